"""What the embedded engine's number formats cost: perplexity on the held-out text, against float32.

    python -m benchmarks engine_quality -- [--dtypes NAME …] [--chunks N]

The engine's own forward pass over the test set that `overspill models verify` measures with (`models.measure.corpus`),
in chunks of 512 tokens that are sequences of their own. Fails if int8 costs more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from cloud_tier.engine.messages import Segment
from cloud_tier.engine.model import Model
from cloud_tier.engine.parallel import Group
from cloud_tier.engine.protocol import EngineConfig
from models.catalogue.families import load_catalogue
from models.formats.weights import open_weights
from models.measure import corpus
from models.store.store import ModelStore
from models.text.chat import PromptEncoder
from router.base.host import usable_cores

FAMILY = "smollm2-135m"
REFERENCE = "float32"
MOST_INT8_PCT = 1.0
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Row:
    """One number format: perplexity over all scored tokens, and how much more that is than float32's."""

    dtype: str
    perplexity: float
    increase_pct: float
    tokens: int


def perplexity(source: Path, dtype: str, chunks: Sequence[list[int]]) -> float:
    """Score every chunk as one prompt whose tokens but the first are taken for drafts, so that all have logits."""
    longest = max(map(len, chunks))
    blocks = -(-longest // BLOCK_TOKENS) + 1
    config = EngineConfig(
        weights=str(source),
        dtype=dtype,  # type: ignore[arg-type]
        max_running=1,
        token_budget=longest + 1,
        kv_cache_tokens=blocks * BLOCK_TOKENS,
        threads=(usable_cores(),),
    )
    model = Model(open_weights(source), config, Group(), longest)
    loss, tokens = 0.0, 0
    for number, chunk in enumerate(chunks):
        segment = Segment(0, chunk, [(0, blocks)], draws=True, handle=number, earlier=len(chunk) - 1)
        logits = model.forward([segment], released=[number - 1]).logits
        assert logits is not None
        targets = torch.tensor(chunk[1:])
        loss += torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="sum").item()
        tokens += len(targets)
    return math.exp(loss / tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--chunks", type=int, default=0, help="of the test set; 0 takes all")
    wanted = parser.parse_args()
    source = ModelStore().source_path(FAMILY)
    (family,) = (one for one in load_catalogue() if one.name == FAMILY)
    encoder = PromptEncoder.load(source, prepend_bos=family.prepend_bos)
    chunks = corpus.chunks("test", encoder)[: wanted.chunks or None]
    tokens = sum(len(chunk) - 1 for chunk in chunks)
    reference = perplexity(source, REFERENCE, chunks)
    rows = [Row(REFERENCE, round(reference, 3), 0.0, tokens)]
    for dtype in wanted.dtypes:
        found = perplexity(source, dtype, chunks)
        rows.append(Row(dtype, round(found, 3), round(100 * (found / reference - 1), 2), tokens))
    shown = Table(box=box.SIMPLE_HEAD, title=f"{FAMILY}: {tokens} tokens of held-out text", title_justify="left")
    for name in ("engine", "perplexity", "against float32"):
        shown.add_column(name, justify="left" if name == "engine" else "right")
    for row in rows:
        shown.add_row(row.dtype, f"{row.perplexity:.2f}", f"{row.increase_pct:+.2f} %")
    Console().print(shown)
    if wanted.json:
        wanted.json.write_text(json.dumps({"model": FAMILY, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return int(any(row.dtype == "int8" and row.increase_pct > MOST_INT8_PCT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
