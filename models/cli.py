"""`overspill models`: look into the catalogue, fill the store, and make, check and build what edge devices run."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hardware_profiles.facts import read_facts
from hardware_profiles.loader import choose_profile
from models.catalogue.catalogue import Catalog, Family, Source, Variant, family_of_directory, load_catalog
from models.progress import noting, watching
from models.store.disk import disk_errors
from models.store.store import ModelStore, default_root
from router.base.errors import ArtifactError, InvalidRequest, ModelNotFound
from router.base.extras import install

if TYPE_CHECKING:
    from models.graph.artifact import Note

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="The catalogue and the toolchain."
)


class TensorRt(str, enum.Enum):
    """Which library builds."""

    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt_rtx"


FamilyName = Annotated[str, typer.Argument(metavar="FAMILY", help="A family's name, or the path of a directory.")]
VariantName = Annotated[str, typer.Argument(metavar="VARIANT", help="A variant's name; see `overspill models list`.")]
StoreFolder = Annotated[
    Path | None,
    typer.Option(
        "--store", metavar="DIR", help="The store; default $OVERSPILL_MODELS, else ~/.cache/overspill/models."
    ),
]
CatalogueFolder = Annotated[
    Path | None, typer.Option("--catalogue", metavar="DIR", help="A folder of family files besides the built-in ones.")
]
Force = Annotated[bool, typer.Option("--force", help="Do it again, even where the result is there and whole.")]


@app.command()
def pull(
    family: FamilyName,
    *,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Also make the artifacts that edge devices run (needs the cloud extra).")
    ] = False,
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="With --prepare: only this one; may be repeated.")
    ] = None,
    force: Force = False,
    store: StoreFolder = None,
    catalogue: CatalogueFolder = None,
) -> None:
    """Bring a family's weights into the store, verified. What is there already is used again."""
    opened = _open(store, catalogue)
    known = opened.catalog.family(family)
    wanted = [known.variant(name) for name in variant] if variant else _edge_variants(known)
    if variant and not prepare:
        raise typer.BadParameter("--variant names artifacts to make; add --prepare")
    if prepare and not wanted:
        raise _nothing_to_prepare(known)
    console = Console()
    with watching(console) as watcher:
        path = opened.pull(known, watcher, force=force)
    console.print(f"{known.name}: [green]ready[/] at {escape(str(path))}", soft_wrap=True)
    if not prepare:
        return
    for chosen in wanted:
        with noting(console) as note:
            folder = _make(chosen, opened, force, note)
        console.print(f"{chosen.name}: [green]ready[/] at {escape(str(folder))}", soft_wrap=True)


@app.command(name="list")
def list_(store: StoreFolder = None, catalogue: CatalogueFolder = None) -> None:
    """Show every family, its rungs, and which of them are in the store."""
    opened = _open(store, catalogue)
    console = Console()
    console.print(f"[dim]store: {escape(str(opened.root))}[/]", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("rung", "variant", "quality", "form", "layers", "in the store"):
        table.add_column(heading, no_wrap=True)
    for family in opened.catalog:
        table.add_row("", f"[bold]{family.name}[/]", "", "", "", "")
        for variant in family.variants:
            table.add_row(
                str(variant.rung),
                variant.name,
                f"{variant.quality:.3f}",
                f"{variant.precision} {variant.format}",
                "all" if variant.layers is None else str(len(variant.layers)),
                _state(opened, family, variant),
            )
        table.add_section()
    console.print(table)


@app.command()
def show(name: FamilyName, store: StoreFolder = None, catalogue: CatalogueFolder = None) -> None:
    """Show a family or a variant: size, licence, sources, ladder, and what was measured. A path works too."""
    opened = _open(store, catalogue)
    family = _family_or_variant(opened.catalog, name)
    console = Console()
    facts = _facts()
    facts.add_row("family", f"[bold]{family.name}[/] ({escape(family.title)})")
    facts.add_row("parameters", f"{family.parameters:,}")
    facts.add_row("context", f"{family.context_tokens:,} tokens")
    facts.add_row("licence", escape(family.licence))
    first = {True: "prepended", False: "left as it is", None: "as the model's files say"}[family.prepend_bos]
    facts.add_row("raw text", f"first token {first}")
    for index, source in enumerate(family.sources, 1):
        facts.add_row(f"source {index}", _source_line(source))
    facts.add_row("in the store", _source_state(opened, family))
    console.print(facts)
    for variant in family.variants:
        if name in (family.name, variant.name) or name not in {v.name for v in family.variants}:
            console.print()
            console.print(_variant_facts(opened, family, variant))


@app.command()
def export(
    variant: VariantName, *, force: Force = False, store: StoreFolder = None, catalogue: CatalogueFolder = None
) -> None:
    """Export a float32 variant to ONNX: what INT8 rungs are verified against, and runnable itself."""
    from models.graph.export import export as run  # noqa: PLC0415 — brings torch and onnx

    _write("exported", lambda note: run(variant, _open(store, catalogue), force=force, note=note))


@app.command()
def quantize(
    variant: VariantName, *, force: Force = False, store: StoreFolder = None, catalogue: CatalogueFolder = None
) -> None:
    """Make an INT8 variant's artifact: Q/DQ, symmetric, per channel, in the form that TensorRT parses."""
    from models.int8.quantize import quantize as run  # noqa: PLC0415 — brings torch and onnx

    _write("quantised", lambda note: run(variant, _open(store, catalogue), force=force, note=note))


@app.command()
def verify(
    variant: VariantName,
    *,
    threads: Annotated[int, typer.Option(min=0, help="Threads of one operator; 0 takes every CPU.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A sample of the text, no timing, no memory.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
    store: StoreFolder = None,
    catalogue: CatalogueFolder = None,
) -> None:
    """Measure an INT8 variant beside float32: perplexity, agreement, speed, memory. Exits with 1 over its budget."""
    from models.measure.verify import VerifyOptions, render  # noqa: PLC0415 — brings torch and onnx
    from models.measure.verify import verify as run  # noqa: PLC0415

    options = VerifyOptions(threads, chunks=4 if quick else 0, speed=not quick, memory=not quick)
    console = Console()
    with noting(console) as note:
        found = run(variant, _open(store, catalogue), options=options, note=note)
    console.print(render(found))
    if report is not None:
        with disk_errors(report):
            report.write_bytes(found.to_json() + b"\n")
    for failure in found.failures:
        console.print(f"[red]✗[/] {escape(failure)}", soft_wrap=True)
    if not found.passed:
        raise typer.Exit(1)
    console.print(f"[green]✓[/] {found.variant} keeps its budget")


@app.command()
def prune(
    family: FamilyName,
    *,
    keep: Annotated[int, typer.Option(min=1, help="How many layers to keep.")],
    chats: Annotated[int, typer.Option(min=1, help="How many calibration chats to measure on.")] = 16,
    store: StoreFolder = None,
    catalogue: CatalogueFolder = None,
) -> None:
    """Choose the layers of a smaller rung by measured perplexity, and print them as the catalogue writes them."""
    from models.graph.artifact import encoder_of  # noqa: PLC0415 — brings torch and onnx
    from models.graph.fused import fuse  # noqa: PLC0415
    from models.measure.corpus import chats as chats_of  # noqa: PLC0415
    from models.prune.prune import prune as run  # noqa: PLC0415

    opened = _open(store, catalogue)
    known = opened.catalog.family(family)
    console = Console()
    sample = chats_of("calibration", encoder_of(opened, known.name))[:chats]
    sequences = [chat.prompt_ids + chat.answer_ids for chat in sample]
    with noting(console) as note:
        steps = run(fuse(opened.weights(known.variants[0].name)), sequences, keep, note=note)
    whole, chosen = steps[0].perplexity, steps[-1].perplexity
    console.print(f"layers = {list(steps[-1].layers)}", soft_wrap=True)
    console.print(f"[dim]perplexity on calibration chats {whole:.3f} → {chosen:.3f} ({whole / chosen:.3f})[/]")


@app.command()
def build(
    variant: VariantName,
    *,
    runtime: Annotated[
        TensorRt | None,
        typer.Option(
            help="tensorrt builds for this machine's GPU, tensorrt_rtx for any; default: the first that is installed."
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="SM", help="The GPU to build for, as sm86; default: this machine's.")
    ] = None,
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="Device class whose figures count; auto: this machine's.")
    ] = "auto",
    batch: Annotated[int | None, typer.Option(min=1, help="Most sequences in one step; default: its KV slots.")] = None,
    context: Annotated[int | None, typer.Option(min=64, help="Most tokens of a sequence; default: its window.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Most new tokens of a step; default: its chunk.")] = None,
    store: StoreFolder = None,
    catalogue: CatalogueFolder = None,
) -> None:
    """Build the TensorRT engine of an artifact, INT8 checked. An engine built from the same is used again.

    The agent refuses an engine that is smaller than what it is configured to serve, and names the options.
    """
    try:
        from models.tensorrt.build import BuildOptions  # noqa: PLC0415 — brings onnx
        from models.tensorrt.build import build as run  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ArtifactError(
            f"to build an engine, `{error.name}` is needed: pip install {error.name}; the whole toolchain is the extra "
            f"`cloud`: {install('cloud')}"
        ) from error

    if batch is None or context is None or chunk is None:
        serving = choose_profile(profile, read_facts()).profile.serving
        batch, context = batch or serving.kv_slots, context or serving.context_tokens
        chunk = chunk or serving.prefill_chunk_tokens
    options = BuildOptions((1, 1, batch), (1, 1, chunk), (1, min(256, context), context))
    console = Console()
    with noting(console) as note:
        engine = run(
            variant,
            _open(store, catalogue),
            runtime=None if runtime is None else runtime.value,
            target=target,
            options=options,
            note=note,
        )
    made = "there already" if engine.reused else f"built in {engine.build_s:.0f} s"
    console.print(
        f"[green]{made}[/]: {escape(str(engine.plan))}\n[dim]{engine.plan_bytes / 1e6:,.0f} MB for {engine.target}, "
        f"up to {batch} sequences of {context} tokens in chunks of {chunk}; "
        f"{engine.runtime} {engine.runtime_version}, INT8 checked in the {engine.int8_checked}[/]",
        soft_wrap=True,
    )


def _write(done: str, run: Callable[[Note], Path]) -> None:
    console = Console()
    with noting(console) as note:
        folder = run(note)
    console.print(f"[green]{done}[/] to {escape(str(folder))}", soft_wrap=True)


def _open(store: Path | None, catalogue: Path | None) -> ModelStore:
    root = store.expanduser() if store else default_root()
    return ModelStore(root, load_catalog(catalogue.expanduser() if catalogue else None))


def _family_or_variant(catalog: Catalog, name: str) -> Family:
    try:
        return catalog.family_of(name)
    except ModelNotFound:
        if "/" not in name and Path(name, "config.json").is_file():
            return family_of_directory(Path(name))
        return catalog.family(name)


def _edge_variants(family: Family) -> list[Variant]:
    return [variant for variant in family.variants if variant.format == "onnx"]


def _nothing_to_prepare(family: Family) -> InvalidRequest:
    source = family.sources[0]
    where = f"with `uri = {source.uri!r}` and" if source.scheme == "dir" else "with"
    return InvalidRequest(
        f"no catalogue names an edge variant of `{family.name}`, so there is nothing to prepare. Write "
        f'{family.name}.toml {where} a variant of `format = "onnx"` (docs/models.md: "Your own model on a device"), '
        f"and run: overspill models pull {family.name} --prepare --catalogue FOLDER",
        param="family",
    )


def _make(variant: Variant, store: ModelStore, force: bool, note: Note) -> Path:
    if variant.precision == "int8":
        from models.int8.quantize import quantize  # noqa: PLC0415 — brings torch and onnx

        return quantize(variant.name, store, force=force, note=note)
    from models.graph.export import export  # noqa: PLC0415 — as above

    return export(variant.name, store, force=force, note=note)


def _facts() -> Table:
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True, style="dim", width=13)
    facts.add_column(overflow="fold")
    return facts


def _state(store: ModelStore, family: Family, variant: Variant) -> str:
    try:
        if variant.format == "onnx":
            size_bytes = _size_bytes(store.artifact_dir(variant))
            return f"[green]yes[/], {size_bytes / 1e6:,.0f} MB"
        store.source_path(family)
    except ArtifactError as error:
        return "[red]damaged[/]" if "--force" in error.message else "no"
    return "[green]yes[/]"


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _source_line(source: Source) -> str:
    pinned = [*source.files.values()] if source.files else [source.sha256]
    trust = "sha256 pinned" if all(pinned) else "sha256 trusted on first use"
    if source.scheme == "dir":
        trust = "used where it lies"
    stored = f", {source.stored_as}" if source.stored_as else ""
    size = f", {source.size_bytes / 1e6:,.0f} MB" if source.size_bytes else ""
    return f"{escape(source.uri)} [dim]({trust}{stored}{size})[/]"


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


def _variant_facts(store: ModelStore, family: Family, variant: Variant) -> Table:
    facts = _facts()
    facts.add_row(f"rung {variant.rung}", f"[bold]{variant.name}[/]")
    facts.add_row("quality", f"{variant.quality:.3f} [dim]({escape(variant.quality_measured)})[/]")
    facts.add_row("precision", f"{variant.precision}, {variant.format}, for {' and '.join(variant.runtimes) or 'none'}")
    if variant.layers is not None:
        facts.add_row("layers kept", ", ".join(map(str, variant.layers)))
    if variant.derived_from:
        facts.add_row("made of", variant.derived_from)
    budget = variant.budget
    if budget is not None:
        facts.add_row(
            "budget",
            f"perplexity ≤ +{budget.max_perplexity_increase_pct:g} %, top-1 ≥ {budget.min_top1_agreement_pct:g} %, "
            f"decode ≥ {budget.min_speedup:g}× at batch 1 and {budget.min_speedup_batch4:g}× at batch 4",
        )
    facts.add_row("in the store", _state(store, family, variant))
    return facts
