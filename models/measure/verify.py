"""Verify an INT8 variant against float32 in the same runtime, and gate it on the catalogue's budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.table import Table

from models.catalogue.families import Budget
from models.graph.artifact import Note, encoder_of, silent
from models.graph.export import export
from models.graph.gate import GraphFacts, problems
from models.graph.gate import inspect as inspect_graph
from models.measure import corpus, footprint
from models.measure.footprint import Footprint
from models.measure.quality import Comparison, HeldOut, Scores, compare, score
from models.measure.runner import OnnxRunner
from models.measure.speed import CASES, Case, Rate, race
from router.base.errors import InvalidRequest
from router.base.host import usable_cores

if TYPE_CHECKING:
    from models.catalogue.families import Variant
    from models.store.store import ModelStore
    from models.text.chat import PromptEncoder


@dataclass(frozen=True)
class VerifyOptions:
    """How thoroughly to measure.

    Attributes:
        threads: of one operator; 0 takes every CPU this process may use.
        turns: interleaved turns of each timed case.
        chunks, chats: of the test set's text and chats, 0 for all.
        spoken: chats that are also answered freely.
        speed, memory: whether to time and weigh; the speed budget is checked only where it was timed.
    """

    threads: int = 0
    turns: int = 12
    chunks: int = 0
    chats: int = 0
    spoken: int = 12
    speed: bool = True
    memory: bool = True


@dataclass(frozen=True)
class Measured:
    """One artifact's size, rates (in the order of `models.measure.speed.CASES`) and memory, as far as measured."""

    file_bytes: int
    rates: tuple[Rate, ...] = ()
    memory: Footprint | None = None


@dataclass(frozen=True)
class VerifyReport:
    """Everything that was measured.

    Attributes:
        quality: perplexity of the family's rung 0 over this variant's, at most 1: the catalogue's number.
        measured: by artifact name; the variant and its reference.
        failures: broken promises, one line each; empty means that the variant may serve.
    """

    variant: str
    reference: str
    comparison: Comparison
    quality: float
    graph: GraphFacts
    measured: Mapping[str, Measured]
    cases: tuple[Case, ...]
    threads: int
    scored_tokens: int
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    def speedup(self, case: int) -> float | None:
        """Tokens a second relative to the reference, None where it was not timed."""
        one, other = self.measured[self.variant].rates, self.measured[self.reference].rates
        return one[case].tokens_per_s / other[case].tokens_per_s if one and other else None

    def to_json(self) -> bytes:
        """The report as indented JSON, with `passed`."""
        return msgspec.json.format(msgspec.json.encode({"passed": self.passed, **msgspec.to_builtins(self)}))


def verify(
    variant_name: str, store: ModelStore, *, options: VerifyOptions | None = None, note: Note = silent
) -> VerifyReport:
    """Measure an INT8 variant beside the float32 it was made from, which is exported first if need be.

    Raises:
        ModelNotFound, InvalidRequest: the variant is unknown or no INT8 artifact.
        ArtifactError: it was not quantized yet, or is damaged.
    """
    chosen = options or VerifyOptions()
    variant = store.catalogue.variant(variant_name)
    if variant.format != "onnx" or variant.derived_from is None:
        raise InvalidRequest(
            f"`{variant.name}` is a {variant.format} variant; verify compares INT8 artifacts with float32",
            param="variant",
        )
    store.check_artifact(variant)
    folder = store.artifact_dir(variant)
    reference = export(variant.derived_from, store, note=note)
    threads = chosen.threads or usable_cores()
    runners = {path.name: OnnxRunner(path, threads) for path in (folder, reference)}
    encoder = encoder_of(store, variant.family)
    chunks, chats = corpus.chunks("test", encoder), corpus.chats("test", encoder)
    chunks = chunks[: chosen.chunks or None]
    data = HeldOut(chunks, chats[: chosen.chats or None], chosen.spoken, bare=corpus.bare(chunks, encoder))
    scores = {name: _score(name, runner, data, encoder, note) for name, runner in runners.items()}
    comparison = compare(scores[variant.name], scores[reference.name], data, encoder.tokenizer)
    best = _best_perplexity(store, variant, scores[reference.name], data, encoder, threads=threads, note=note)
    rates: Mapping[str, list[Rate]] = {}
    if chosen.speed:
        note("timing both, turn by turn")
        rates = race(runners, turns=chosen.turns)
    runners.clear()
    measured = {
        path.name: _measure(path, tuple(rates.get(path.name, ())), chosen.memory) for path in (folder, reference)
    }
    report = VerifyReport(
        variant=variant.name,
        reference=reference.name,
        comparison=comparison,
        quality=min(1.0, best / comparison.perplexity),
        graph=inspect_graph(folder / "model.onnx"),
        measured=measured,
        cases=CASES,
        threads=threads,
        scored_tokens=len(scores[variant.name].text_choices) + len(scores[variant.name].chat_choices),
        failures=(),
    )
    failures = (*problems(folder / "model.onnx"), *comparison.faults, *overruns(report, variant.budget))
    return replace(report, failures=failures)


def _score(name: str, runner: OnnxRunner, data: HeldOut, encoder: PromptEncoder, note: Note) -> Scores:
    note(f"{name}: scoring the test set")
    return score(runner, data, encoder.tokenizer.eos_ids)


def _best_perplexity(
    store: ModelStore,
    variant: Variant,
    reference: Scores,
    data: HeldOut,
    encoder: PromptEncoder,
    *,
    threads: int,
    note: Note,
) -> float:
    """Perplexity of the family's rung 0, which may be better than the reference's: that may be a pruned one."""
    top = store.catalogue.family(variant.family).variants[0]
    if top.name == variant.derived_from:
        return reference.perplexity
    folder = export(top.name, store, note=note)
    text_only = replace(data, chats=(), spoken=0, bare=())
    return _score(folder.name, OnnxRunner(folder, threads), text_only, encoder, note).perplexity


def _measure(folder: Path, rates: tuple[Rate, ...], memory: bool) -> Measured:
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Measured(size, rates, footprint.measure(folder) if memory else None)


def overruns(report: VerifyReport, budget: Budget | None) -> list[str]:
    """What breaks the budget, one line each; a variant without one has only to be sound."""
    if budget is None:
        return []
    found, seen = [], report.comparison
    bare = "text that begins anywhere"
    for kind, increase in (("", seen.perplexity_increase_pct), (f" on {bare}", seen.bare_increase_pct)):
        if increase is not None and increase > budget.max_perplexity_increase_pct:
            found.append(f"perplexity{kind} +{increase:.2f} %, the budget is +{budget.max_perplexity_increase_pct:g} %")
    agreements = (
        ("text", seen.text_agreement_pct, budget.min_top1_agreement_pct),
        ("chat", seen.chat_agreement_pct, budget.min_top1_agreement_pct),
        (bare, seen.bare_agreement_pct, budget.min_bare_agreement_pct),
    )
    for kind, agreement, least in agreements:
        if agreement is not None and agreement < least:
            found.append(f"top-1 on {kind} {agreement:.1f} %, the budget is {least:g} %")
    for case, least in ((0, budget.min_speedup), (1, budget.min_speedup_batch4)):
        gain = report.speedup(case)
        if gain is not None and gain < least:
            found.append(f"{report.cases[case].name}: {gain:.2f}× the reference, the budget is {least:g}×")
    return found


def render(report: VerifyReport) -> Table:
    """The report as a table: the reference beside the variant, then the difference."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{report.variant} against {report.reference}", title_justify="left")
    for heading in ("", report.reference, report.variant, "difference"):
        table.add_column(heading, justify="left" if not heading else "right")
    seen = report.comparison
    table.add_row(
        "perplexity, test text",
        f"{seen.reference_perplexity:.3f}",
        f"{seen.perplexity:.3f}",
        f"{seen.perplexity_increase_pct:+.2f} %",
    )
    table.add_row("top-1 agreement, text", "", f"{seen.text_agreement_pct:.1f} %", "")
    table.add_row("top-1 agreement, chat", "", f"{seen.chat_agreement_pct:.1f} %", "")
    if seen.bare_increase_pct is not None and seen.bare_agreement_pct is not None:
        table.add_row("perplexity, text that begins anywhere", "", "", f"{seen.bare_increase_pct:+.2f} %")
        table.add_row("top-1 agreement, text that begins anywhere", "", f"{seen.bare_agreement_pct:.1f} %", "")
    table.add_row("same beginning, free answers", "", f"{seen.same_prefix_pct:.0f} %", "")
    table.add_row("free answers that loop", str(seen.reference_loops), str(seen.loops), "")
    table.add_row("quality (rung 0 = 1)", "", f"{report.quality:.3f}", "")
    reference, variant = report.measured[report.reference], report.measured[report.variant]
    for index, case in enumerate(report.cases):
        gain = report.speedup(index)
        if gain is not None:
            cells = [f"{side.rates[index].tokens_per_s:,.0f} tok/s" for side in (reference, variant)]
            table.add_row(case.name, *cells, f"{gain:.2f}×")
    sizes = (reference.file_bytes / 1e6, variant.file_bytes / 1e6)
    table.add_row("files", *(f"{size:,.0f} MB" for size in sizes), f"{sizes[1] / sizes[0]:.2f}×")
    if reference.memory is not None and variant.memory is not None:
        taken = [side.model_bytes / 1e6 for side in (reference.memory, variant.memory)]
        cells = [f"{size:,.0f} MB" for size in taken]
        table.add_row("memory of model and runtime", *cells, f"{taken[1] / taken[0]:.2f}×")
    table.add_row("INT8 matrices", "", f"{report.graph.int8_matrices} of {report.graph.matrices}", "")
    return table
