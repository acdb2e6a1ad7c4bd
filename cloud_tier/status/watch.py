"""Looks at a tier again and again: a table that stays in place, or one line of JSON for each look."""

from __future__ import annotations

import contextlib
import time

import msgspec
import typer
from rich.console import RenderableType
from rich.live import Live

from cloud_tier.status.ask import ask
from cloud_tier.status.show import away, tier_as_table
from router.base.errors import ReplicaUnreachable
from router.client.tier import TierAddress
from router.values.status import TierStatus


def watch(address: TierAddress, every_s: float, *, as_json: bool) -> None:
    """Look until Ctrl-C. A tier that goes away, as it does when it restarts, is shown as that and asked again.

    Raises:
        OverspillError: the first look fails; see `ask`.
    """
    told: TierStatus | str = ask(address)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        live = None if as_json else stack.enter_context(Live(auto_refresh=False))
        while True:
            if live is None:
                typer.echo(msgspec.json.encode({"away": told} if isinstance(told, str) else told).decode())
            else:
                live.update(_frame(told, address), refresh=True)
            time.sleep(every_s)
            told = _look(address)


def _look(address: TierAddress) -> TierStatus | str:
    try:
        return ask(address)
    except ReplicaUnreachable as error:
        return error.message


def _frame(told: TierStatus | str, address: TierAddress) -> RenderableType:
    return away(address.base, told) if isinstance(told, str) else tier_as_table(told, address.base, fit=True)
