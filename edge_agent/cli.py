"""`overspill edge run|check|profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.config import EdgeConfig, load_config
from router.base import logs
from router.base.config import Flag
from router.base.garbage import spare_what_was_imported
from router.base.json_output import print_json
from router.base.large_pages import move_heap

app = typer.Typer(
    no_args_is_help=True, help="The agent on the device.", add_completion=False, pretty_exceptions_enable=False
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="TOML file; examples/edge.toml documents every key.", show_default="defaults"),
]
HostOption = Annotated[
    str | None, typer.Option("--host", help="Over gateway.host; beyond loopback API keys are required.")
]
PortOption = Annotated[int | None, typer.Option("--port", help="Over gateway.port; 0 picks a free one.")]
UpstreamOption = Annotated[str | None, typer.Option("--upstream", help="Over upstream.url.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("serve", hidden=True)  # as the cloud tier calls it
@app.command()
def run(
    config: ConfigOption = None, host: HostOption = None, port: PortOption = None, upstream: UpstreamOption = None
) -> None:
    """Serve until SIGTERM; streams in flight then finish before it ends."""
    loaded = _load(config, host, port, upstream)
    settings = loaded.agent
    from edge_agent.daemon import serve  # noqa: PLC0415  (`edge --help` must be quick)

    logs.configure(settings.log_level, settings.log_format)
    spare_what_was_imported()
    move_heap()
    serve(loaded)


@app.command()
def check(
    config: ConfigOption = None,
    host: HostOption = None,
    port: PortOption = None,
    upstream: UpstreamOption = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Validate configuration, profile, artifacts, address and upstream, and say what `run` would do.

    Exits 2 if it could not run; an upstream that is away now is a warning.
    """
    loaded = _load(config, host, port, upstream)
    from edge_agent.report import check_as_json, check_lines  # noqa: PLC0415

    if as_json:
        print_json(check_as_json(loaded))
        return
    for line in check_lines(loaded):
        typer.echo(line)


@app.command()
def profile(config: ConfigOption = None, *, as_json: AsJson = False) -> None:
    """Say which device this is, which profile it gets and why, and how it is doing."""
    loaded = _load(config)
    from edge_agent.report import profile_as_json, profile_lines  # noqa: PLC0415

    if as_json:
        print_json(profile_as_json(loaded))
        return
    for line in profile_lines(loaded):
        typer.echo(line)


def _load(
    config: Path | None, host: str | None = None, port: int | None = None, upstream: str | None = None
) -> EdgeConfig:
    flags = {
        "gateway.host": Flag("--host", host),
        "gateway.port": Flag("--port", port),
        "upstream.url": Flag("--upstream", upstream),
    }
    return load_config(config, flags=flags)
