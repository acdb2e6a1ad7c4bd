"""Many devices at once, as the broker knows them, kept up to date message by message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from cloud_tier.fleet.broker import BrokerError, Message
from cloud_tier.fleet.view import DeviceView, Outcome, absence, judge
from router.fleetwire.documents import DesiredConfig
from router.fleetwire.topics import Address, Leaf, parse_topic


class Survey:
    """Opened by `FleetOperator.survey`, which feeds it; all methods are for its event loop.

    Attributes:
        views: by device; every device that something is kept about, and those asked for by name.
    """

    def __init__(self, fleet: str, lost: asyncio.Future[str], devices: Iterable[str] | None = None) -> None:
        """Begin empty.

        Args:
            lost: resolves when the connection is lost, and ends every wait.
            devices: their names; None takes whatever comes.
        """
        self.fleet = fleet
        self.views = {device: DeviceView(Address(fleet, device)) for device in devices or ()}
        self._open = devices is None
        self._lost = lost
        self._came_s = 0.0
        self._read: dict[Leaf, set[str]] = {}
        self._news: dict[str, asyncio.Future[None]] = {}
        lost.add_done_callback(lambda _: self._wake(*self._news))

    def take(self, message: Message) -> None:
        """Fold one message in, and wake who waits for its device."""
        parsed = parse_topic(message.topic)
        if parsed is None or parsed[0].fleet != self.fleet:
            return
        address, leaf = parsed
        if not (self._open or address.device in self.views):
            return
        if message.retained:
            self._came_s = time.monotonic()
            self._read.setdefault(leaf, set()).add(address.device)
        self.view(address.device).take(leaf, message.payload)
        self._wake(address.device)

    def view(self, device: str) -> DeviceView:
        """Return what is known about a device; an empty view if that is nothing.

        Raises:
            ConfigError: the name is not valid.
        """
        return self.views.setdefault(device, DeviceView(Address(self.fleet, device)))

    def read(self, leaf: Leaf) -> int:
        """Of how many devices a retained message of this kind came."""
        return len(self._read.get(leaf, ()))

    def has_all_of(self, leaves: Iterable[Leaf]) -> bool:
        """Whether every device asked for by name has sent a retained message of each of these kinds."""
        return not self._open and all(self.read(leaf) == len(self.views) for leaf in leaves)

    async def settled(self, quiet_s: float) -> None:
        """Wait until no retained message came for `quiet_s`.

        Raises:
            BrokerError: the connection was lost meanwhile.
        """
        began_s = time.monotonic()
        while (left_s := max(began_s, self._came_s) + quiet_s - time.monotonic()) > 0:
            await asyncio.wait({self._lost}, timeout=left_s)
            self._check_connection()

    async def outcome(self, device: str, desired: DesiredConfig, timeout_s: float) -> Outcome:
        """Wait until a device says what became of a document.

        Raises:
            BrokerError: the connection was lost meanwhile.
        """
        view, deadline_s = self.view(device), time.monotonic() + timeout_s
        while True:
            outcome = judge(desired, view.reported) if view.reported is not None else None
            if outcome is not None:
                return outcome
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                waited = f"no word within {timeout_s:g} s"
                return Outcome("timeout", f"{waited}: {absence(view)}", reported=view.reported)
            news = self._news.setdefault(device, asyncio.get_running_loop().create_future())
            self._check_connection()
            await asyncio.wait({news}, timeout=left_s)  # a lost connection wakes everyone
            self._check_connection()

    def _wake(self, *devices: str) -> None:
        for device in devices:
            news = self._news.pop(device, None)
            if news is not None and not news.done():
                news.set_result(None)

    def _check_connection(self) -> None:
        if self._lost.done():
            raise BrokerError(f"the connection to the broker was lost: {self._lost.result()}")
