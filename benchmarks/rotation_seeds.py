"""INT8 quality over eight seeds of the rotation: which one the selection set chooses, and what all do on the test set.

    python -m benchmarks rotation_seeds -- [--variant NAME] [--seeds N]

Each seed is made as `overspill models quantize --seeds` makes it, measured, and thrown away: one to two minutes each.
Choose by the first column; the other columns tell how much the choice matters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from models.graph.artifact import Note
from models.graph.export import export
from models.int8.quantize import Quantizer
from models.measure import corpus
from models.measure.quality import HeldOut, compare, score
from models.measure.runner import OnnxRunner
from models.store.store import ModelStore
from router.base.host import usable_cores


@dataclass(frozen=True)
class Row:
    """One rotation against the same float32 model; increases and agreements in percent."""

    seed: int
    refused: str
    selection_perplexity: float
    selection_increase_pct: float
    test_perplexity: float
    test_increase_pct: float
    text_agreement_pct: float
    chat_agreement_pct: float


FIGURES = ("selection_increase_pct", "test_increase_pct", "text_agreement_pct", "chat_agreement_pct")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variant", default="smollm2-135m-int8")
    parser.add_argument("--seeds", type=int, default=8)
    wanted = parser.parse_args()
    console = Console()
    result = measure(wanted.variant, range(1, wanted.seeds + 1), lambda line: console.print(f"[dim]{line}[/]"))
    console.print(table(wanted.variant, result))
    if wanted.json:
        wanted.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str, seeds: range, note: Note) -> dict[str, Any]:
    store = ModelStore()
    variant = store.catalogue.variant(name)
    quantizer = Quantizer(variant, store, note)
    encoder, eos_ids = quantizer.encoder, quantizer.encoder.tokenizer.eos_ids
    text = HeldOut(corpus.chunks("selection", encoder), (), spoken=0)
    test = HeldOut(corpus.chunks("test", encoder), corpus.chats("test", encoder), spoken=0)
    reference = OnnxRunner(export(str(variant.derived_from), store), usable_cores())
    on_selection, on_test = (score(reference, data, eos_ids) for data in (text, test))
    del reference
    note(
        f"float32: perplexity {on_selection.perplexity:.3f} on the selection set, "
        f"{on_test.perplexity:.3f} on the test set"
    )
    rows = []
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir=store.root) as folder:
            trial = quantizer.trial(Path(folder), seed)
            seen = score(OnnxRunner(Path(folder), usable_cores()), test, eos_ids)
        found = compare(seen, on_test, test, encoder.tokenizer)
        increase_pct = 100 * (trial.perplexity / on_selection.perplexity - 1)
        rows.append(
            Row(
                seed,
                trial.refused,
                trial.perplexity,
                increase_pct,
                found.perplexity,
                found.perplexity_increase_pct,
                found.text_agreement_pct,
                found.chat_agreement_pct,
            )
        )
        note(json.dumps(asdict(rows[-1])))
    chosen = min((row for row in rows if not row.refused), key=lambda row: row.selection_perplexity)
    values = {figure: [getattr(row, figure) for row in rows] for figure in FIGURES}
    return {
        "variant": name,
        "float32": {"selection_perplexity": on_selection.perplexity, "test_perplexity": on_test.perplexity},
        "test_tokens": {"text": len(on_test.text_choices), "chats": len(on_test.chat_choices)},
        "selection_tokens": len(on_selection.text_choices),
        "chosen_seed": chosen.seed,
        "seeds": [asdict(row) for row in rows],
        "over_seeds": {
            figure: {"mean": mean(seen), "stdev": stdev(seen), "least": min(seen), "most": max(seen)}
            for figure, seen in values.items()
            if len(seen) > 1
        },
    }


def table(name: str, result: dict[str, Any]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title=f"{name}, seed by seed", title_justify="left")
    for heading in ("seed", "selection", "test", "top-1 text", "top-1 chats", ""):
        shown.add_column(heading, justify="right")
    for row in result["seeds"]:
        marks = ["chosen"] if row["seed"] == result["chosen_seed"] else []
        marks += ["refused"] if row["refused"] else []
        signs = ("+.2f", "+.2f", ".1f", ".1f")
        cells = [f"{row[figure]:{sign}} %" for figure, sign in zip(FIGURES, signs, strict=True)]
        shown.add_row(str(row["seed"]), *cells, ", ".join(marks))
    for kind in ("mean", "stdev"):
        shown.add_row(kind, *(f"{result['over_seeds'][figure][kind]:.2f} %" for figure in FIGURES), "")
    return shown


if __name__ == "__main__":
    main()
