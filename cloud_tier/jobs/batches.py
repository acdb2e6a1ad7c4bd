"""`overspill cloud jobs list|cancel`: the batches of a running tier, of all tenants for an operator's key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from router.base.errors import ConfigError
from router.base.json_output import print_json
from router.client.tier import CLOUD_URL, KEY_VARIABLE, TierAddress

if TYPE_CHECKING:
    import httpx

app = typer.Typer(help="The batches of a running tier.", no_args_is_help=True)

_Url = Annotated[str, typer.Option("--url", metavar="URL", help="Base URL of the tier; an edge agent answers too.")]
_CaFile = Annotated[Path | None, typer.Option("--ca-file", help="PEM of a private authority, for https.")]
_PAGE = 100
_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


@app.command("list")
def show(
    *,
    url: _Url = CLOUD_URL,
    ca_file: _CaFile = None,
    ended: Annotated[bool, typer.Option("--ended", help="Also those that have ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show batches, the newest first: whose, how far, and until when.

    The key is read from $OVERSPILL_API_KEY: an operator's shows those of everybody.
    """
    found = [batch for batch in _batches(_address(url, ca_file)) if ended or batch["status"] not in _ENDED]
    if as_json:
        print_json(found)
        return
    for batch in found:
        counts = batch["request_counts"]
        typer.echo(
            f"{batch['id']}  {batch['status']:<11}  {counts['completed'] + counts['failed']} of {counts['total']} "
            f"answered, {counts['failed']} failed  {batch.get('tenant') or '-'}"
        )
    if not found:
        typer.echo("no batches")


@app.command()
def cancel(
    batch_id: Annotated[str, typer.Argument(metavar="BATCH", help="As `jobs list` shows it.")],
    *,
    url: _Url = CLOUD_URL,
    ca_file: _CaFile = None,
) -> None:
    """Cancel a batch; what was answered is kept."""
    address = _address(url, ca_file)
    batch = _told(address, address.post(f"/v1/batches/{batch_id}/cancel"))
    typer.echo(f"{batch['id']} is {batch['status']}")


def _address(url: str, ca_file: Path | None) -> TierAddress:
    return TierAddress(url, os.environ.get(KEY_VARIABLE, ""), ca_file)


def _batches(address: TierAddress) -> Iterator[dict[str, Any]]:
    after, which = "", "&all=true"
    while True:
        reply = address.get(f"/v1/batches?limit={_PAGE}{which}{after}")
        if reply.status_code == 403 and which:
            which = ""  # a tenant's own key: its own batches
            continue
        page = _told(address, reply)
        yield from page["data"]
        if not page["has_more"]:
            return
        after = f"&after={page['last_id']}"


def _told(address: TierAddress, reply: httpx.Response) -> dict[str, Any]:
    """Return what a reply says.

    Raises:
        ConfigError: there is no such batch, or the tier keeps none; says so in the tier's words.
        ReplicaUnreachable: it is no tier of this release.
    """
    try:
        told: dict[str, Any] = reply.json()
        error = told.get("error")
    except (ValueError, AttributeError):
        raise address.stranger() from None
    if error:
        raise ConfigError(str(error["message"]))
    return told
