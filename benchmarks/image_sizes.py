"""What a smaller image costs a face detector: which faces each rung of `examples/faces.toml` still finds.

    python -m benchmarks image_sizes

A photograph with one face (Grace Hopper's, of matplotlib's sample data) is laid at seven sizes and eight places each on
a dark image of 1280 × 960 pixels. A face is found where a box covers it with an intersection over union of 0.5 or more;
where it is, the photograph alone tells, by the first rung. `quality` is the share of the first rung's faces that a rung
finds: the figure that the router compares rungs by. One face in one light is no data set: it tells what the size of the
image does, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import cbook
from PIL import Image

from edge_agent.config import load_config
from edge_agent.serving.declared import DeclaredModel, Machine, declared_models
from hardware_profiles.loader import RuntimeOptions
from models.pipelines.declared.assembly import plan_of
from models.pipelines.declared.rows import Row
from models.pipelines.pipeline import Pipeline
from models.store.store import ModelStore
from router.base.clock import MonotonicClock

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "faces.toml"
CANVAS = (1280, 960)
SHARES = (0.06, 0.09, 0.13, 0.2, 0.3, 0.5, 1.0)  # of the photograph's own size
PLACES = 8
COVERS = 0.5


def coded(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def scenes(photograph: Any) -> list[tuple[float, tuple[int, int], bytes]]:
    """Return share, place and file of each scene."""
    places, found = np.random.default_rng(5), []
    for share in SHARES:
        small = photograph.resize((round(photograph.width * share), round(photograph.height * share)))
        for _ in range(PLACES):
            left = int(places.integers(0, CANVAS[0] - small.width))
            top = int(places.integers(0, CANVAS[1] - small.height))
            scene = Image.new("RGB", CANVAS, (40, 40, 40))
            scene.paste(small, (left, top))
            found.append((share, (left, top), coded(scene)))
    return found


async def detect(model: DeclaredModel, files: Sequence[bytes]) -> list[np.ndarray[Any, Any]]:
    """Return the boxes of each image, (N, 4)."""
    pipeline = Pipeline(plan_of(model.checked(None)), MonotonicClock())
    await pipeline.open()
    try:
        rows: list[Row] = [{"image": np.array([file], dtype=object)} for file in files]
        done = await pipeline.run(rows, priority=0, due_s=float("inf"), cost=len(rows))
    finally:
        await pipeline.close()
    return [row["boxes"] for row in done.results]


def covered(boxes: np.ndarray[Any, Any], face: np.ndarray[Any, Any]) -> bool:
    """Whether a box covers a face."""
    shared = np.prod(np.maximum(np.minimum(boxes[:, 2:], face[2:]) - np.maximum(boxes[:, :2], face[:2]), 0), axis=1)
    whole = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) + np.prod(face[2:] - face[:2]) - shared
    return bool((shared >= COVERS * whole).any())


async def measure() -> list[dict[str, Any]]:
    """Return a row a rung."""
    machine = Machine(ModelStore(), RuntimeOptions(intra_op_threads=1))
    models = declared_models(load_config(EXAMPLE, environ={}).pipelines, machine)
    with Image.open(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)) as photograph:
        photograph.load()
    [[face]] = await detect(models[0], [coded(photograph)])
    drawn = scenes(photograph)
    rows: list[dict[str, Any]] = []
    for model in models:
        boxes = await detect(model, [file for _, _, file in drawn])
        hits = [
            (share, covered(found, face * share + np.tile(place, 2)))
            for (share, place, _), found in zip(drawn, boxes, strict=True)
        ]
        by_size = {share: sum(hit for at, hit in hits if at == share) for share in SHARES}
        total = sum(by_size.values())
        rows.append(
            {
                "pipeline": model.settings.name,
                **{f"found_{round((face[3] - face[1]) * share)}_px": by_size[share] for share in SHARES},
                "of_each": PLACES,
                "quality": round(total / max(1, rows[0]["found"] if rows else total), 2),
                "found": total,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = asyncio.run(measure())
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
