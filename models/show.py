"""How families and variants look: as tables for people, as plain values for `--json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.markup import escape
from rich.table import Table

from models.catalogue.families import Family, Source, Variant
from models.store.store import ModelStore
from router.base.errors import ArtifactError, ArtifactMissing

_FIRST_TOKEN = {True: "prepended", False: "left as it is", None: "as the model's files say"}


class Stored(msgspec.Struct, frozen=True):
    """What the store holds of a variant.

    Attributes:
        state: `yes`, `no` or `damaged`.
        size_bytes: of an artifact's files, None for weights and where there is none.
        path: the artifact's folder, or the family's source; None where there is none.
        problem: what is missing or wrong, and the command that helps.
    """

    state: str
    size_bytes: int | None = None
    path: Path | None = None
    problem: str = ""


def stored(store: ModelStore, family: Family, variant: Variant) -> Stored:
    """Return what of a variant is in the store."""
    try:
        if variant.format == "onnx":
            folder = store.artifact_dir(variant)
            return Stored("yes", sum(path.stat().st_size for path in folder.iterdir()), folder)
        return Stored("yes", path=store.source_path(family))
    except ArtifactMissing as error:
        return Stored("no", problem=error.message)
    except ArtifactError as error:
        return Stored("damaged", problem=error.message)


def families_as_json(store: ModelStore) -> dict[str, Any]:
    """Return all that `list` shows."""
    return {"store": str(store.root), "families": [family_as_json(store, family) for family in store.catalogue]}


def family_as_json(store: ModelStore, family: Family) -> dict[str, Any]:
    """Return a family with its ladder: the catalogue's keys, and for each variant what is in the store."""
    whole: dict[str, Any] = msgspec.to_builtins(family)
    whole["variants"] = [variant_as_json(store, family, variant) for variant in family.variants]
    return whole


def variant_as_json(store: ModelStore, family: Family, variant: Variant) -> dict[str, Any]:
    """Return a variant as the catalogue writes it, and what of it is in the store."""
    seen = stored(store, family, variant)
    path = None if seen.path is None else str(seen.path)
    whole: dict[str, Any] = msgspec.to_builtins(variant)
    return {**whole, "stored": {**msgspec.to_builtins(msgspec.structs.replace(seen, path=None)), "path": path}}


def families_as_table(store: ModelStore) -> Table:
    """Return every family and its rungs, a line each."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("rung", "variant", "quality", "form", "layers", "in the store"):
        table.add_column(heading, no_wrap=True)
    for family in store.catalogue:
        table.add_row("", f"[bold]{family.name}[/]", "", "", "", "")
        for variant in family.variants:
            table.add_row(
                str(variant.rung),
                variant.name,
                f"{variant.quality:.3f}",
                f"{variant.precision} {variant.format}",
                "all" if variant.layers is None else str(len(variant.layers)),
                _state(stored(store, family, variant)),
            )
        table.add_section()
    return table


def family_as_table(store: ModelStore, family: Family) -> Table:
    """Return what is known of a family but its rungs."""
    facts = _facts()
    facts.add_row("family", f"[bold]{family.name}[/] ({escape(family.title)})")
    facts.add_row("parameters", f"{family.parameters:,}")
    facts.add_row("context", f"{family.context_tokens:,} tokens")
    facts.add_row("licence", escape(family.licence))
    facts.add_row("raw text", f"first token {_FIRST_TOKEN[family.prepend_bos]}")
    for index, source in enumerate(family.sources, 1):
        facts.add_row(f"source {index}", _source_line(source))
    facts.add_row("in the store", _source_state(store, family))
    return facts


def variant_as_table(store: ModelStore, family: Family, variant: Variant) -> Table:
    """Return what is known of one rung."""
    facts = _facts()
    facts.add_row(f"rung {variant.rung}", f"[bold]{variant.name}[/]")
    facts.add_row("quality", f"{variant.quality:.3f} [dim]({escape(variant.quality_measured)})[/]")
    facts.add_row("precision", f"{variant.precision}, {variant.format}, for {' and '.join(variant.runtimes) or 'none'}")
    if variant.layers is not None:
        facts.add_row("layers kept", ", ".join(map(str, variant.layers)))
    if variant.derived_from:
        facts.add_row("made of", variant.derived_from)
    if variant.rotation_seed is not None:
        facts.add_row("rotation", f"seed {variant.rotation_seed}")
    budget = variant.budget
    if budget is not None:
        facts.add_row(
            "budget",
            f"perplexity ≤ +{budget.max_perplexity_increase_pct:g} %, top-1 ≥ {budget.min_top1_agreement_pct:g} %, "
            f"decode ≥ {budget.min_speedup:g}× at batch 1 and {budget.min_speedup_batch4:g}× at batch 4",
        )
    facts.add_row("in the store", _state(stored(store, family, variant)))
    return facts


def _facts() -> Table:
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True, style="dim", width=13)
    facts.add_column(overflow="fold")
    return facts


def _state(seen: Stored) -> str:
    if seen.state == "damaged":
        return "[red]damaged[/]"
    size = "" if seen.size_bytes is None else f", {seen.size_bytes / 1e6:,.0f} MB"
    return f"[green]yes[/]{size}" if seen.state == "yes" else "no"


def _source_line(source: Source) -> str:
    pinned = [*source.files.values()] if source.files else [source.sha256]
    trust = "sha256 pinned" if all(pinned) else "sha256 trusted on first use"
    if source.scheme == "dir":
        trust = "used where it lies"
    kind = f", {source.stored_as}" if source.stored_as else ""
    size = f", {source.size_bytes / 1e6:,.0f} MB" if source.size_bytes else ""
    return f"{escape(source.uri)} [dim]({trust}{kind}{size})[/]"


def _source_state(store: ModelStore, family: Family) -> str:
    try:
        path = store.source_path(family)
    except ArtifactError as error:
        return f"[yellow]no[/]: {escape(error.message)}"
    if family.sources[0].scheme == "dir":
        return escape(str(path))
    record = store.source_record(family)
    revision = f" at {record.revision}" if record.revision else ""
    return f"{escape(str(path))} [dim](from {escape(record.uri)}{revision})[/]"
