"""`overspill explain ID`: asks the running tier, or reads its decision file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from router.base.errors import ConfigError, InvalidRequest
from router.base.json_input import UNREADABLE
from router.base.json_output import print_json
from router.base.terminal import plain
from router.client.tier import EDGE_URL, KEY_VARIABLE, TierAddress
from router.decisions.explain import five_lines
from router.decisions.line import Decision, decode
from router.decisions.reader import DecisionReader

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The `x-request-id` of the reply.")],
    *,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="PATH", help="Read this decision file and its older ones.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Base URL of the tier to ask.", show_default=EDGE_URL),
    ] = None,
    ca_file: Annotated[Path | None, typer.Option("--ca-file", help="PEM of a private authority, for https.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole decision as JSON.")] = False,
) -> None:
    """Say in five lines why a request went where it went. The key that sent it is read from $OVERSPILL_API_KEY."""
    if file is not None and url is not None:
        raise ConfigError("give either --file or --url: a decision is looked up in one place")
    if file is not None:
        found = find(request_id, file)
    else:
        found = fetch(request_id, url or EDGE_URL, os.environ.get(KEY_VARIABLE, ""), ca_file)
    if as_json:
        print_json(found.to_json())
        return
    for line in five_lines(found):
        typer.echo(plain(line))


def find(request_id: str, path: Path) -> Decision:
    """Look a decision up in a file.

    Raises:
        ConfigError: there is no such file.
        InvalidRequest: it holds no such id.
    """
    reader = DecisionReader(path)
    found = reader.find(request_id)
    if found is None:
        damaged = f", {reader.skipped} damaged lines among them" if reader.skipped else ""
        raise InvalidRequest(
            f"{path} and its older files hold no request {request_id!r} ({reader.read} lines{damaged}); requests are "
            "written when they end, and the oldest files go first"
        )
    return found


def fetch(request_id: str, url: str, key: str, ca_file: Path | None = None) -> Decision:
    """Ask a running tier.

    Raises:
        ConfigError: the URL is none.
        ReplicaUnreachable: nothing answers there, or something else does.
        Unauthenticated: the tier does not know the key.
        InvalidRequest: it keeps no such id for this key.
    """
    tier = TierAddress(url, key, ca_file, hint="`--file` reads what it has written")
    reply = tier.get(f"/v1/decisions/{quote(request_id, safe='')}")
    if reply.status_code == 404:
        raise InvalidRequest(
            f"{tier.base} keeps no decision for {request_id!r}: it shows the recent ones (`router.decision_log`) to "
            "the key that sent the request; `--file` reads older ones where `[decisions]` keeps a file"
        )
    if reply.status_code != 200:
        raise tier.odd(reply)
    try:
        return decode(reply.content)
    except UNREADABLE as error:
        raise tier.stranger() from error
