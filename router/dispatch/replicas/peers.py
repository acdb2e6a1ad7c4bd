"""Replicas that a request cannot tell apart by what they serve: of many, a decision looks at a few.

Of two that are drawn at random, the better one is almost as good as the best of all, and far better than one (the power
of two choices; Mitzenmacher, IEEE TPDS 12(10), 2001). Those that are known to have room are drawn first (join the idle
queue; Lu et al., Performance Evaluation 68(11), 2011), so that no request waits while any of them has room. Who has to
wait does so for all of them, in one line.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from router.values.replica import ReplicaInfo

CHOICES = 2
_TRIES = 8
_FEW = 4  # so many are looked at anyway


def alike(refusing: ReplicaInfo, other: ReplicaInfo) -> bool:
    """Tell whether what one replica says of a request itself holds for another: neither is known to differ in it.

    Servers of one backend are of one kind, so are the rungs of one upstream tier, and copies of one engine. A longer
    window may take what a shorter one refused.
    """
    if refusing.backend or other.backend:
        related = refusing.backend == other.backend
    elif refusing.remote or other.remote:
        related = refusing.endpoint == other.endpoint
    else:
        related = refusing.variant == other.variant
    return related and other.context_tokens <= refusing.context_tokens and _abilities(refusing) == _abilities(other)


def _abilities(info: ReplicaInfo) -> tuple[object, ...]:
    return info.version, info.lacks, info.offers, info.signature


class _Bag:
    """Names to draw from; what is done takes the same time, however many there are."""

    __slots__ = ("_at", "_names")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._at: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def put(self, name: str, *, inside: bool) -> None:
        """Add a name, or take it out; what is so already stays as it is."""
        at = self._at.get(name)
        if inside is (at is not None):
            return
        if at is None:
            self._at[name] = len(self._names)
            self._names.append(name)
            return
        last = self._names.pop()
        del self._at[name]
        if last != name:
            self._names[at] = last
            self._at[last] = at

    def draw(self, chance: random.Random) -> list[str]:
        """Return a few names in a random order: all of few."""
        names, number = self._names, len(self._names)
        if number <= _TRIES:
            return chance.sample(names, number)
        return [names[int(chance.random() * number)] for _ in range(_TRIES)]


class Peers:
    """Replicas of one variant, on one side of a link, with equal windows.

    Attributes:
        line: the name under which requests wait for any of them.
    """

    def __init__(self, line: str) -> None:
        self.line = line
        self._all = _Bag()
        self._usable = _Bag()
        self._with_room = _Bag()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, name: str) -> None:
        """Take a replica in; it may be asked, and has room, until it is `seen`."""
        for bag in (self._all, self._usable, self._with_room):
            bag.put(name, inside=True)

    def seen(self, name: str, *, usable: bool, room: bool) -> None:
        """A replica was looked at: whether it may be asked at all, and whether it could start a request at once."""
        self._usable.put(name, inside=usable)
        self._with_room.put(name, inside=usable and room)

    def draw(self, chance: random.Random, without: Collection[str] = ()) -> Iterator[str]:
        """Yield names to look at, the likeliest first; look at each before taking the next, and `seen` what it is.

        Args:
            without: names that are of no use to the request.
        """
        if len(self._all) <= _FEW:
            yield from list(self._all)
            return
        tried: set[str] = set()
        for bag in (self._with_room, self._usable, self._all):
            for name in bag.draw(chance):
                if name not in tried and name not in without:
                    tried.add(name)
                    yield name


class PeerGroups:
    """All replicas of a tier, each among its peers; empty where they are few.

    Attributes:
        chance: that draws are made with.
    """

    def __init__(self, seed: int | None) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - spreads load, keeps no secret
        self._of: dict[str, Peers] = {}

    def group(self, infos: Iterable[ReplicaInfo], apart: Callable[[ReplicaInfo], tuple[object, ...]]) -> None:
        """Find the peers anew.

        Args:
            apart: what else tells replicas apart.
        """
        self._of = {}
        groups: dict[tuple[object, ...], Peers] = {}
        for info in infos:
            told = (info.family, info.variant, info.remote, info.tier, info.quality, info.context_tokens, info.lacks)
            kind = (*told, *apart(info))
            if kind not in groups:
                groups[kind] = Peers(f"any of {info.variant} #{len(groups) + 1}")
            self._of[info.replica_id] = groups[kind]
            groups[kind].add(info.replica_id)

    def of(self, name: str) -> Peers | None:
        return self._of.get(name)

    def number(self, name: str) -> int:
        """Count a replica and its peers."""
        peers = self._of.get(name)
        return 1 if peers is None else len(peers)

    def kinds(self, names: Iterable[str]) -> tuple[Peers, ...]:
        """Return the groups that replicas are of, each once."""
        return tuple(dict.fromkeys([self._of[name] for name in names]))

    def seen(self, name: str, *, usable: bool, room: bool) -> None:
        """See `Peers.seen`."""
        self._of[name].seen(name, usable=usable, room=room)

    def line(self, name: str) -> str:
        """Return the name of the line in which requests wait for a replica: its own, or that of all its peers."""
        peers = self._of.get(name)
        return name if peers is None else peers.line

    def lines(self, waits_for: Mapping[str, float]) -> Mapping[str, float]:
        """Return the lines of replicas that somebody waits for, with the highest rank in each."""
        ranks: dict[str, float] = {}
        for name, rank in waits_for.items():
            line = self.line(name)
            ranks[line] = max(rank, ranks.get(line, -math.inf))
        return ranks
