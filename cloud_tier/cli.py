"""`overspill cloud serve`, `check`, `status`, `keys` and `usage`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from cloud_tier.config import ENV_PREFIX, CloudConfig, load, replace_models
from cloud_tier.jobs.batches import app as jobs_app
from cloud_tier.tenants.keys import app as keys_app
from router.base.clock import MonotonicClock
from router.base.config import Flag, naming_origins
from router.base.credentials import resolved
from router.base.garbage import spare_what_was_imported
from router.base.json_output import print_json
from router.base.large_pages import move_heap
from router.base.loopback import in_url
from router.client.tier import CLOUD_URL, KEY_VARIABLE, TierAddress
from router.decisions.settings import describe
from router.tracing import otlp as traces
from router.upstream.backend_check import backend_lines

if TYPE_CHECKING:
    from cloud_tier.engine_check import EngineReport
    from cloud_tier.engines.settings import CloudBackend
    from cloud_tier.plan import Plan
    from router.values.replica import ReplicaInfo

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="The cloud tier.")
app.add_typer(keys_app, name="keys")
app.add_typer(jobs_app, name="jobs")

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; examples/cloud.toml documents every key.")
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", help="A catalogue name or a Hugging Face directory; may be given several times."),
]
TensorParallelOption = Annotated[
    int | None, typer.Option("--tensor-parallel", "--tp", min=1, help="Ranks an engine, for every model served.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or auto.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16, float16, int8 (CPU) or auto.")]
ServingEngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="torch (embedded), vllm (a server of it is started), or auto: vLLM where it is installed, there is a GPU, "
        "and the model is a Hugging Face directory.",
    ),
]
HostOption = Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback API keys are required.")]
PortOption = Annotated[int | None, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")]


StartEnginesOption = Annotated[
    bool,
    typer.Option(
        "--start-engines",
        help="Also start every embedded engine, let it answer, and compare with float32 on the CPU. With --device cuda "
        "this fails unless every rank computes on a GPU.",
    ),
]


@app.command("run", hidden=True)  # as the edge agent calls it
@app.command()
def serve(
    *,
    config: ConfigOption = None,
    model: ModelOption = None,
    tensor_parallel: TensorParallelOption = None,
    host: HostOption = None,
    port: PortOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    engine: ServingEngineOption = None,
) -> None:
    """Serve models until SIGTERM or Ctrl-C, then drain."""
    from cloud_tier import server  # noqa: PLC0415 - `overspill cloud --help` stays quick
    from cloud_tier.plan import make_plan  # noqa: PLC0415
    from router.base import logs, loop  # noqa: PLC0415

    with _settings(config, model, (host, port), (tensor_parallel, device, dtype, engine)) as settings:
        logs.configure(settings.server.log_level, settings.server.log_format)
        plan = make_plan(settings)
        spare_what_was_imported()
        move_heap()
        loop.run(server.serve(plan))


@app.command()
def check(
    *,
    config: ConfigOption = None,
    model: ModelOption = None,
    tensor_parallel: TensorParallelOption = None,
    host: HostOption = None,
    port: PortOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    engine: ServingEngineOption = None,
    start_engines: StartEnginesOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check configuration, keys, weights and GPUs. Exit status 2 names what is wrong."""
    from cloud_tier.plan import make_plan  # noqa: PLC0415 - as above
    from router.jobs.opening import check_jobs  # noqa: PLC0415
    from router.tenants.tenancy import check_usage_database  # noqa: PLC0415

    with _settings(config, model, (host, port), (tensor_parallel, device, dtype, engine)) as settings:
        plan = make_plan(settings)
        check_usage_database(settings.tenants)
        check_jobs(settings.jobs)
    if not as_json:
        _describe(plan)
    reports = asyncio.run(_run_engines(plan, quiet=as_json)) if start_engines else []
    if as_json:
        told = plan_as_json(plan)
        if start_engines:
            told["engines"] = [asdict(report) for report in reports]
        print_json(told)


@app.command()
def status(
    *,
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="Base URL of the tier; an edge agent answers too.")
    ] = CLOUD_URL,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks, with --watch.")] = 2.0,
    ca_file: Annotated[Path | None, typer.Option("--ca-file", help="PEM of a private authority, for https.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch a line for each look.")] = False,
) -> None:
    """Show a running tier: replicas, load, KV use, rungs, versions, breakers, cold starts, GPUs.

    The key is read from $OVERSPILL_API_KEY.
    """
    from rich.console import Console  # noqa: PLC0415 - as above

    from cloud_tier.status.ask import ask  # noqa: PLC0415
    from cloud_tier.status.show import tier_as_table  # noqa: PLC0415
    from cloud_tier.status.watch import watch as keep_watching  # noqa: PLC0415

    address = TierAddress(url, os.environ.get(KEY_VARIABLE, ""), ca_file)
    if watch:
        keep_watching(address, every, as_json=as_json)
    elif as_json:
        print_json(msgspec.to_builtins(ask(address)))
    else:
        Console().print(tier_as_table(ask(address), address.base))


@app.command()
def usage(
    *,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="Base URL of a running tier.")] = CLOUD_URL,
    database: Annotated[
        str, typer.Option("--database", help="Read this database instead: the file or the URL of tenants.database.")
    ] = "",
    since: Annotated[str, typer.Option("--since", metavar="DAY", help="From this day of UTC on: 2026-11-01.")] = "",
    until: Annotated[str, typer.Option("--until", metavar="DAY", help="Up to this day, included.")] = "",
    ca_file: Annotated[Path | None, typer.Option("--ca-file", help="PEM of a private authority, for https.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what was used by tenant, device, model and day, as CSV.

    The key is read from $OVERSPILL_API_KEY: one of the role `operator` shows every tenant, another its own.
    """
    from cloud_tier.tenants.usage import as_csv, ask_tier, read_database  # noqa: PLC0415 - as above

    if database:
        rows = read_database(resolved(database, "--database", os.environ), since, until)
    else:
        rows = ask_tier(TierAddress(url, os.environ.get(KEY_VARIABLE, ""), ca_file), since, until)
    if as_json:
        print_json(msgspec.to_builtins(rows))
    else:
        typer.echo(as_csv(rows), nl=False)


@contextlib.contextmanager
def _settings(
    config: Path | None,
    models: list[str] | None,
    address: tuple[str | None, int | None],
    engine: tuple[int | None, str | None, str | None, str | None],
) -> Iterator[CloudConfig]:
    """Read the configuration under the options: (host, port), (tensor_parallel, device, dtype, engine).

    What proves to be wrong with it in the block is told with the place that set it.
    """
    flags = {"server.host": Flag("--host", address[0]), "server.port": Flag("--port", address[1])}
    changes = dict(zip(("tensor_parallel", "device", "dtype", "engine"), engine, strict=True))
    of_models = {f"models.{key}": Flag(f"--{key.replace('_', '-')}", value) for key, value in changes.items()}
    of_models |= {f"models.{key}": Flag("--model", models or None) for key in ("variant", "path")}
    with naming_origins(config, CloudConfig, env_prefix=ENV_PREFIX, flags={**flags, **of_models}):
        yield replace_models(load(config, flags=flags), models or [], changes)


async def _run_engines(plan: Plan, *, quiet: bool) -> list[EngineReport]:
    from cloud_tier.engine_check import check_engines  # noqa: PLC0415 - as above
    from cloud_tier.server import torch_engine  # noqa: PLC0415

    reports = []
    async for report in check_engines(plan.specs, torch_engine, MonotonicClock()):
        reports.append(report)
        if quiet:
            continue
        gap = (
            "too large to be compared here" if report.gap is None else f"within {report.gap:.3f} of float32 on the CPU"
        )
        typer.echo(
            f"engine   {report.engine} on {', '.join(report.devices)}: {report.tokens} tokens at "
            f"{report.tokens_per_s:.1f}/s, {gap}"
        )
    return reports


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return what would be served, without secrets."""
    server = plan.config.server
    models = [
        {**msgspec.to_builtins(spec.info), "source": str(spec.source), "engine": msgspec.to_builtins(spec.engine)}
        for spec in plan.specs
    ]
    return {
        "ok": True,
        "host": server.host,
        "port": server.port,
        "api_keys": len(plan.keys.directory()),
        "policy": plan.config.router.policy,
        "models": models,
        "pipelines": [msgspec.to_builtins(served.info) for served in plan.encoders],
        "backends": [{"label": label, "text": text} for label, text in backend_lines(_elsewhere(plan))],
        "servers": [
            {
                "backend": spec.backend.name,
                "kind": spec.backend.kind,
                "variant": spec.settings.served_name,
                "source": spec.settings.model,
                "ranks": spec.settings.ranks,
                "gpus": list(spec.gpus),
            }
            for spec in plan.servers
        ],
    }


def _elsewhere(plan: Plan) -> list[CloudBackend]:
    """Return the backends that run already: one that this tier starts cannot be looked at before."""
    return [entry for entry in plan.config.backends if entry.vllm is None]


def _pipeline_line(info: ReplicaInfo) -> str:
    """A sentence encoder, or a pipeline with what it takes and gives."""
    which = f"{info.variant} (family {info.family}, rung {info.rung})"
    if info.signature is None:
        return f"encoder  {which}: window {info.context_tokens} tokens"
    takes, gives = (", ".join(map(str, tensors)) for tensors in (info.signature.inputs, info.signature.outputs))
    return f"pipeline {which}: {takes} → {gives}"


def _describe(plan: Plan) -> None:
    listens = plan.config.server
    directory = plan.keys.directory()
    keys = len(directory)
    access = f"{keys} API key{'s' if keys != 1 else ''}" if not directory.open else "open to callers on this host"
    secured = ", TLS" if plan.config.tls.enabled else ""
    host = in_url(listens.host)
    typer.echo(f"listen   {host}:{listens.port}{secured}, {access}")
    if plan.config.grpc.enabled:
        typer.echo(f"grpc     {host}:{plan.config.grpc.beside(listens.port)}{secured}, KServe V2")
    for spec in plan.specs:
        engine = spec.engine
        typer.echo(
            f"model    {spec.info.variant} (family {spec.info.family}, rung {spec.info.rung}): "
            f"{engine.tensor_parallel} rank{'s' if engine.tensor_parallel > 1 else ''} on {engine.device}"
            f"{' ' + '+'.join(engine.gpus) if engine.gpus else ''}, "
            f"{engine.dtype}, window {spec.info.context_tokens} tokens, weights {spec.source}"
        )
    for served in plan.encoders:
        typer.echo(_pipeline_line(served.info))
    for label, text in backend_lines(_elsewhere(plan)):
        typer.echo(f"{label:<8} {text}")
    for server in plan.servers:
        settings = server.settings
        typer.echo(
            f"vllm     {settings.served_name} (backend {server.backend.name}): {settings.ranks} "
            f"rank{'s' if settings.ranks > 1 else ''}{' on GPU ' + '+'.join(server.gpus) if server.gpus else ''}, "
            f"model {settings.model}"
        )
    typer.echo(f"policy   {plan.config.router.policy}")
    typer.echo(f"decisions {describe(plan.config.decisions)}")
    typer.echo(f"traces   {traces.describe(plan.config.telemetry)}")
    typer.echo("the configuration is good")
