"""Decode and prefill of float32, INT8 and the pruned INT8 rung in ONNX Runtime, turn by turn in one run.

    python -m benchmarks int8_speed -- [--threads N] [--turns N]

Needs the artifacts of `make models`; the float32 artifact is exported first if it is not there.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from models.graph.export import export
from models.measure.runner import OnnxRunner
from models.measure.speed import CASES, Rate, race
from models.store.store import ModelStore
from router.base.host import usable_cores

REFERENCE = "smollm2-135m-fp32-onnx"
RUNGS = ("smollm2-135m-int8", "smollm2-135m-pruned-int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--turns", type=int, default=15)
    wanted = parser.parse_args()
    store = ModelStore()
    folders = [export(REFERENCE, store), *(store.artifact_dir(name) for name in RUNGS)]
    rates = race({folder.name: OnnxRunner(folder, wanted.threads) for folder in folders}, turns=wanted.turns)
    Console().print(table(rates, wanted.threads))
    if wanted.json:
        rows = {name: [asdict(rate) for rate in seen] for name, seen in rates.items()}
        result = {"threads": wanted.threads, "cases": [asdict(case) for case in CASES], "rates": rows}
        wanted.json.write_text(json.dumps(result, indent=1) + "\n")


def table(rates: dict[str, list[Rate]], threads: int) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title=f"tokens a second (× float32), {threads} threads", title_justify="left")
    shown.add_column("")
    for case in CASES:
        shown.add_column(case.name, justify="right")
    for name, seen in rates.items():
        pairs = zip(seen, rates[REFERENCE], strict=True)
        cells = [f"{rate.tokens_per_s:,.0f} ({rate.tokens_per_s / base.tokens_per_s:.2f}×)" for rate, base in pairs]
        shown.add_row(name, *cells)
    return shown


if __name__ == "__main__":
    main()
