"""`overspill models`: look into the catalogue, fill the store, and make, check and build what edge devices run."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from hardware_profiles.facts import read_facts
from hardware_profiles.loader import choose_profile
from models.catalogue.families import Catalogue, Family, Variant, family_of_directory, load_catalogue
from models.progress import noting, watching
from models.show import (
    families_as_json,
    families_as_table,
    family_as_json,
    family_as_table,
    variant_as_json,
    variant_as_table,
)
from models.store.store import ModelStore, default_root
from router.base.errors import ArtifactError, InvalidRequest, ModelNotFound
from router.base.extras import install
from router.base.json_output import print_json

if TYPE_CHECKING:
    from models.graph.artifact import Note

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="The catalogue and the toolchain."
)


class TensorRt(str, enum.Enum):
    """Which library builds."""

    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt_rtx"


def _families(incomplete: str) -> list[str]:
    return [family.name for family in load_catalogue() if family.name.startswith(incomplete)]


def _variants(incomplete: str) -> list[str]:
    return [v.name for family in load_catalogue() for v in family.variants if v.name.startswith(incomplete)]


FamilyName = Annotated[
    str,
    typer.Argument(metavar="FAMILY", help="A family's name, or the path of a directory.", autocompletion=_families),
]
VariantName = Annotated[
    str,
    typer.Argument(metavar="VARIANT", help="A variant's name; see `overspill models list`.", autocompletion=_variants),
]
StoreFolder = Annotated[
    Path | None,
    typer.Option(
        "--store", metavar="DIR", help="The store; default $OVERSPILL_MODELS, else ~/.cache/overspill/models."
    ),
]
CatalogueFolder = Annotated[
    Path | None, typer.Option("--catalogue", metavar="DIR", help="A folder of family files besides the built-in ones.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and anything else to stderr.")]
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
    known = opened.catalogue.family(family)
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
def list_families(as_json: AsJson = False, store: StoreFolder = None, catalogue: CatalogueFolder = None) -> None:
    """List every family, its rungs, and which of them are in the store."""
    opened = _open(store, catalogue)
    if as_json:
        print_json(families_as_json(opened))
        return
    console = Console()
    console.print(f"[dim]store: {escape(str(opened.root))}[/]", soft_wrap=True)
    console.print(families_as_table(opened))


@app.command()
def show(
    name: FamilyName, as_json: AsJson = False, store: StoreFolder = None, catalogue: CatalogueFolder = None
) -> None:
    """Show a family or a variant: size, licence, sources, ladder, and what was measured. A path works too."""
    opened = _open(store, catalogue)
    family = _family_or_variant(opened.catalogue, name)
    variants = [variant for variant in family.variants if variant.name == name] or family.variants
    if as_json:
        shown = (
            variant_as_json(opened, family, variants[0]) if variants[0].name == name else family_as_json(opened, family)
        )
        print_json(shown)
        return
    console = Console()
    console.print(family_as_table(opened, family))
    for variant in variants:
        console.print()
        console.print(variant_as_table(opened, family, variant))


@app.command()
def export(
    variant: VariantName, *, force: Force = False, store: StoreFolder = None, catalogue: CatalogueFolder = None
) -> None:
    """Export a float32 variant to ONNX: what INT8 rungs are verified against, and runnable itself."""
    opened = _open(store, catalogue)
    _refuse_others(opened.catalogue, variant, "export")
    from models.graph.export import export as run  # noqa: PLC0415 — brings torch and onnx

    _write("exported", lambda note: run(variant, opened, force=force, note=note))


@app.command()
def quantize(
    variant: VariantName,
    *,
    seeds: Annotated[
        int, typer.Option(min=0, help="Try so many rotations, and take the best on the selection set; minutes each.")
    ] = 0,
    force: Force = False,
    store: StoreFolder = None,
    catalogue: CatalogueFolder = None,
) -> None:
    """Make an INT8 variant's artifact: Q/DQ, symmetric, per channel, in the form that TensorRT parses.

    The rotation is the catalogue's `rotation_seed`; with --seeds the one to write there is printed.
    """
    opened = _open(store, catalogue)
    _refuse_others(opened.catalogue, variant, "quantize")
    from models.graph.artifact import record_of  # noqa: PLC0415 — brings torch and onnx
    from models.int8.quantize import quantize as run  # noqa: PLC0415

    _write("quantized", lambda note: run(variant, opened, seeds=range(1, seeds + 1), force=force, note=note))
    record = record_of(opened, opened.catalogue.variant(variant)) if seeds else None
    if record is not None and record.rotation is not None:
        typer.echo(f"rotation_seed = {record.rotation.seed}")


@app.command()
def verify(
    variant: VariantName,
    *,
    threads: Annotated[int, typer.Option(min=0, help="Threads of one operator; 0 takes every CPU.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A sample of the text, no timing, no memory.")] = False,
    as_json: AsJson = False,
    store: StoreFolder = None,
    catalogue: CatalogueFolder = None,
) -> None:
    """Measure an INT8 variant beside float32: perplexity, agreement, speed, memory. Exits with 1 over its budget."""
    opened = _open(store, catalogue)
    if opened.catalogue.family_of(variant).task == "embed":
        _verify_encoder(opened, variant, as_json)
        return
    _refuse_others(opened.catalogue, variant, "verify")
    from models.measure.verify import VerifyOptions, render  # noqa: PLC0415 — brings torch and onnx
    from models.measure.verify import verify as run  # noqa: PLC0415

    options = VerifyOptions(threads, chunks=4 if quick else 0, speed=not quick, memory=not quick)
    console = Console(stderr=as_json)
    with noting(console) as note:
        found = run(variant, opened, options=options, note=note)
    if as_json:
        typer.echo(found.to_json())
    else:
        console.print(render(found))
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
    opened = _open(store, catalogue)
    known = opened.catalogue.family(family)
    _refuse_others(opened.catalogue, known.variants[0].name, "prune")
    from models.graph.artifact import encoder_of  # noqa: PLC0415 — brings torch and onnx
    from models.graph.fused import fuse  # noqa: PLC0415
    from models.measure.corpus import chats as chats_of  # noqa: PLC0415
    from models.prune.prune import prune as run  # noqa: PLC0415

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
    _refuse_others(_open(store, catalogue).catalogue, variant, "build")
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


def _refuse_others(catalogue: Catalogue, variant: str, command: str) -> None:
    """Refuse a command that is for models that generate; a name that nobody knows is told by the command itself.

    Raises:
        InvalidRequest: the variant is an encoder's, or the model of pipelines.
    """
    of_pipelines = {v.name: f.name for f in catalogue if f.task == "infer" for v in f.variants}
    if variant in of_pipelines:
        raise InvalidRequest(
            f"`{variant}` is a model of pipelines, and `{command}` is for models that generate; its artifacts are made "
            f"by: overspill models pull {of_pipelines[variant]} --prepare",
            param="variant",
        )
    of_encoders = {v.name: f.name for f in catalogue if f.task == "embed" for v in f.variants}
    family = of_encoders.get(variant.removesuffix("-onnx"), of_encoders.get(variant))
    if family is not None:
        raise InvalidRequest(
            f"`{variant}` is a sentence encoder, and `{command}` is for models that generate; its artifacts are made "
            f"by: overspill models pull {family} --prepare",
            param="variant",
        )


def _verify_encoder(store: ModelStore, variant: str, as_json: bool) -> None:
    from models.encoder.verify import verify_encoder  # noqa: PLC0415 — brings onnx

    found = verify_encoder(store.catalogue.variant(variant), store)
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        typer.echo(
            f"{found.variant}: cosine with float32 {found.mean_cosine:.5f} (least {found.least_cosine:.5f}) over "
            f"{found.texts} texts; the same nearest text for {found.same_nearest_pct:.1f} %"
        )
    for failure in found.failures:
        typer.echo(f"✗ {failure}", err=True)
    if found.failures:
        raise typer.Exit(1)


def _write(done: str, run: Callable[[Note], Path]) -> None:
    console = Console()
    with noting(console) as note:
        folder = run(note)
    console.print(f"[green]{done}[/] to {escape(str(folder))}", soft_wrap=True)


def _open(store: Path | None, catalogue: Path | None) -> ModelStore:
    root = store.expanduser() if store else default_root()
    return ModelStore(root, load_catalogue(catalogue.expanduser() if catalogue else None))


def _family_or_variant(catalogue: Catalogue, name: str) -> Family:
    try:
        return catalogue.family_of(name)
    except ModelNotFound:
        if "/" not in name and Path(name, "config.json").is_file():
            return family_of_directory(Path(name))
        return catalogue.family(name)


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
    if store.catalogue.family(variant.family).task == "embed":
        from models.encoder.artifact import make_encoder  # noqa: PLC0415 — brings onnx

        return make_encoder(variant, store, force=force, note=note)
    if store.catalogue.family(variant.family).task == "infer":
        from models.vision.artifact import make_onnx  # noqa: PLC0415 — brings onnx

        return make_onnx(variant, store, force=force, note=note)
    if variant.precision == "int8":
        from models.int8.quantize import quantize  # noqa: PLC0415 — brings torch and onnx

        return quantize(variant.name, store, force=force, note=note)
    from models.graph.export import export  # noqa: PLC0415 — as above

    return export(variant.name, store, force=force, note=note)
