"""From which addresses this machine would reach the broker: one more is a reason to try again at once."""

from __future__ import annotations

import asyncio

from router.base.path import sources_towards

_LOOK_S = 1.0


class Ways:
    """What this machine has of networks on the way to one host.

    Args:
        host: the broker's name or address.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._known: set[str] = set()

    def note(self) -> None:
        """Take what there is now for known: the broker is about to be tried over it."""
        self._known = sources_towards(self._host)

    async def another(self) -> None:
        """Wait for an address that was not there at the last look; one that went and came back is such a one."""
        while not (now := sources_towards(self._host)) - self._known:
            self._known = now
            await asyncio.sleep(_LOOK_S)
