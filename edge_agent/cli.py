"""`overspill edge run|check|profile`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from edge_agent.config import ENV_PREFIX, EdgeConfig, load_config
from router.base import logs
from router.base.config import Flag, naming_origins
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
    with _loaded(config, host, port, upstream) as loaded:
        from edge_agent.daemon import serve  # noqa: PLC0415  (`edge --help` must be quick)

        logs.configure(loaded.agent.log_level, loaded.agent.log_format)
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
    from edge_agent.report import check_as_json, check_lines  # noqa: PLC0415

    with _loaded(config, host, port, upstream) as loaded:
        if as_json:
            print_json(check_as_json(loaded))
            return
        for line in check_lines(loaded):
            typer.echo(line)


@app.command()
def profile(config: ConfigOption = None, *, as_json: AsJson = False) -> None:
    """Say which device this is, which profile it gets and why, and how it is doing."""
    from edge_agent.report import profile_as_json, profile_lines  # noqa: PLC0415

    with _loaded(config) as loaded:
        if as_json:
            print_json(profile_as_json(loaded))
            return
        for line in profile_lines(loaded):
            typer.echo(line)


@contextlib.contextmanager
def _loaded(
    config: Path | None, host: str | None = None, port: int | None = None, upstream: str | None = None
) -> Iterator[EdgeConfig]:
    """Read the configuration; what proves to be wrong with it in the block is told with the place that set it."""
    flags = {
        "gateway.host": Flag("--host", host),
        "gateway.port": Flag("--port", port),
        "upstream.url": Flag("--upstream", upstream),
    }
    with naming_origins(config, EdgeConfig, env_prefix=ENV_PREFIX, flags=flags):
        yield load_config(config, flags=flags)
