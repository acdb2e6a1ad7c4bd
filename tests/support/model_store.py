"""A store with one tiny family, its float32 and INT8 artifacts placed as the toolchain places them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from models.catalogue.families import Budget, Catalogue, Family, Source, Variant
from models.graph.fused import FusedModel, fuse
from models.graph.graph import QuantPlan, write_graph
from models.int8.rounding import prepare
from models.store.store import ModelStore
from tests.support.tiny_models import TinyWeights, tiny_config

SEQUENCES = [[1, *np.random.default_rng(seed).integers(3, 96, 40).tolist()] for seed in range(12)]


def tiny_store(root: Path) -> ModelStore:
    measured: dict[str, Any] = {"quality": 1.0, "quality_measured": "in a test"}
    fp32 = Variant(name="tiny-fp32", rung=0, precision="fp32", format="weights", **measured)
    budget = Budget(max_perplexity_increase_pct=2.0, min_top1_agreement_pct=91.0, min_speedup=1.8)
    int8 = Variant(
        name="tiny-int8",
        rung=1,
        precision="int8",
        format="onnx",
        derived_from="tiny-fp32",
        budget=budget,
        **measured,
    )
    family = Family(
        name="tiny",
        title="Tiny",
        parameters=1,
        context_tokens=128,
        licence="none",
        sources=(Source(uri="file:/nowhere"),),
        variants=(fp32, int8),
    )
    store = ModelStore(root, Catalogue([family]))
    ready = prepare(fuse(TinyWeights(tiny_config())), SEQUENCES, seed=7)
    _place(store, "tiny-int8", ready.model, ready.plan)
    return store


def _place(store: ModelStore, name: str, model: FusedModel, plan: QuantPlan | None) -> None:
    with store.placing(store.catalogue.variant(name)) as folder:
        write_graph(model, folder, plan)
        files = {
            path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
            for path in folder.iterdir()
        }
        (folder / "manifest.json").write_text(json.dumps({"files": files}))
