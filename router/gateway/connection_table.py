"""Which connections are open, and which must go when there are too many: idle strangers before anybody else."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from functools import lru_cache
from typing import Protocol

import structlog

log = structlog.get_logger("router.gateway")

_RELAXED = 0.75

Peer = tuple[str, int] | None


class Connection(Protocol):
    """What the table needs of one."""

    client: Peer

    def make_room(self) -> None:
        """Close: the table needs room for another connection."""
        ...


class ConnectionTable:
    """Open connections, by what they have shown.

    One is unproven until a request of it was let in: with a key, or from this host where there are no keys. Unproven
    ones may hold half of the table. When that half or the table is full, the oldest unproven connection of the address
    that has most of them makes room, and when there is none, the proven one that has been idle for longest.

    Args:
        max_connections: open at once.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = self._fitting = max_connections
        self._max_unproven = max(1, max_connections // 2)
        self._addresses: dict[Connection, str] = {}  # of unproven ones
        self._unproven: defaultdict[str, dict[Connection, None]] = defaultdict(dict)  # oldest first
        self._by_count: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._most = 0
        self._proven: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # proven, without a request; idle for longest first
        self.closed = 0

    def __len__(self) -> int:
        return len(self._addresses) + len(self._proven)

    def opened(self, connection: Connection, *, crowded: bool = False) -> bool:
        """Take a new connection in; False if there is no room even so, and it must be told to come back.

        Args:
            crowded: the process may hardly open anything more, whatever else it has open: no more than now fit beside
                that, until many have gone.
        """
        if crowded:
            self._fitting = max(1, len(self))
        elif len(self) < _RELAXED * self._fitting:
            self._fitting = self.max_connections
        while len(self) >= self._fitting or len(self._addresses) >= self._max_unproven:
            leaving = self._least()
            if leaving is None:
                return False
            self.lost(leaving)
            if self.closed & (self.closed - 1) == 0:  # the first, second, fourth, …: a flood fills no log
                log.warning(
                    "too many connections: an idle one was closed for another",
                    address=address_of(leaving.client),
                    closed=self.closed + 1,
                    max_connections=self.max_connections,
                )
            self.closed += 1
            leaving.make_room()
        address = self._addresses[connection] = address_of(connection.client)
        self._unproven[address][connection] = None
        self._recounted(address, len(self._unproven[address]) - 1)
        return True

    def lost(self, connection: Connection) -> None:
        """Forget a connection; one that is not in the table does no harm."""
        self._no_longer_unproven(connection)
        self._proven.discard(connection)
        self._idle.pop(connection, None)

    def proved(self, connection: Connection) -> None:
        """A request of it was let in, and runs."""
        if self._no_longer_unproven(connection):
            self._proven.add(connection)

    def busy(self, connection: Connection) -> None:
        """A request of it begins."""
        self._idle.pop(connection, None)

    def rests(self, connection: Connection) -> None:
        """Its last request was answered."""
        if connection in self._proven:
            self._idle[connection] = None

    def _least(self) -> Connection | None:
        if self._most:
            address = next(iter(self._by_count[self._most]))
            return next(iter(self._unproven[address]))
        return next(iter(self._idle), None)

    def _no_longer_unproven(self, connection: Connection) -> bool:
        address = self._addresses.pop(connection, None)
        if address is None:
            return False
        del self._unproven[address][connection]
        self._recounted(address, len(self._unproven[address]) + 1)
        if not self._unproven[address]:
            del self._unproven[address]
        return True

    def _recounted(self, address: str, before: int) -> None:
        """Keep the addresses sorted by how many unproven connections they have."""
        self._by_count[before].pop(address, None)
        now = len(self._unproven[address])
        if now:
            self._by_count[now][address] = None
        self._most = max(self._most, now)
        while self._most and not self._by_count[self._most]:
            del self._by_count[self._most]
            self._most -= 1


def address_of(peer: Peer) -> str:
    """Return whom a connection is counted for: an address, or the network of 64 bits that one household holds."""
    return "" if peer is None else _counted_as(peer[0])


@lru_cache(maxsize=1024)
def _counted_as(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None) or address
    return str(mapped) if mapped.version == 4 else str(ipaddress.ip_network((int(mapped) >> 64 << 64, 64)))
