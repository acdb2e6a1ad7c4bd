"""Canaries: a new deployment of a model with a share of its requests, which steps back by itself once surely worse.

Who goes there is drawn by a hash of the session, or of the request where it names none: a session stays on its side, in
every process, and a larger weight moves nobody back. The draw is what makes the comparison fair. Four tests look on
(`router.signals.sequential`), each with its part of `false_alarm`:

| test      | heads, or a failure of the canary                                                  | part |
|-----------|------------------------------------------------------------------------------------|------|
| `errors`  | an attempt failed: by what the breaker counts, or refused as invalid               | 1/2  |
| `ttft`    | sent → first token, longer than `slower` times the median of stable ones just before | 1/6  |
| `pace`    | seconds a token, likewise                                                          | 1/6  |
| `probes`  | a quality probe failed on the canary and passed on the stable deployment           | 1/6  |

A session counts once in each test: its requests are alike, and their sum would be no draw.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from statistics import median

from router.base.clock import Clock, MonotonicClock
from router.signals.sequential import FailureTest, SignTest
from router.values.replica import ReplicaInfo
from router.values.request import InferenceRequest
from router.values.settings import CanarySettings, DeploymentPattern

_PARTS = {"errors": 1 / 2, "ttft": 1 / 6, "pace": 1 / 6, "probes": 1 / 6}
_MOST_STABLE = 9  # figures of the stable deployment that one of the canary is compared with; odd
_REPLICAS = 4_096  # whose side is known without looking again
_UNITS = 16_384  # sessions and requests remembered as counted


class Side(str, Enum):
    """Which deployment a request belongs to, or a replica."""

    CANARY = "canary"
    STABLE = "stable"

    @property
    def other(self) -> Side:
        return Side.STABLE if self is Side.CANARY else Side.CANARY


@dataclass(slots=True)
class SideCounts:
    """What was counted of one side."""

    answered: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class CanaryState:
    """A canary as one moment's decision saw it.

    Attributes:
        side: of the request.
        weight: in force: 0 after it stepped back.
        why: it stepped back; empty while it has not.
    """

    name: str
    side: str
    weight: float
    why: str = ""


@dataclass(slots=True)
class Canary:
    """One `[[router.canary]]`, and what was seen of it.

    Attributes:
        began_s: attempts sent before are not compared.
        why: why it stepped back; empty while it has not.
        by: the test that said so.
    """

    settings: CanarySettings
    began_s: float
    why: str = ""
    by: str = ""
    counts: dict[Side, SideCounts] = field(default_factory=lambda: {side: SideCounts() for side in Side})
    errors: FailureTest = field(default_factory=FailureTest)
    ttft: SignTest = field(default_factory=SignTest)
    pace: SignTest = field(default_factory=SignTest)
    probes: SignTest = field(default_factory=SignTest)
    _stable: dict[str, deque[float]] = field(default_factory=lambda: {n: deque(maxlen=_MOST_STABLE) for n in _PARTS})
    _counted: OrderedDict[tuple[str, ...], None] = field(default_factory=OrderedDict)
    _sides: dict[str, tuple[ReplicaInfo, Side | None]] = field(default_factory=dict)

    @property
    def weight(self) -> float:
        """In force now."""
        return 0.0 if self.why else self.settings.weight

    def side_of(self, request: InferenceRequest) -> Side:
        """Draw the side of a request: the same for all of its session."""
        drawn = hashlib.blake2b("\0".join((self.settings.name, *_unit(request))).encode(), digest_size=8)
        below = int.from_bytes(drawn.digest(), "big") / 2**64 < self.weight
        return Side.CANARY if below else Side.STABLE

    def state(self, request: InferenceRequest) -> CanaryState:
        return CanaryState(self.settings.name, self.side_of(request).value, self.weight, self.why)

    def side_at(self, info: ReplicaInfo) -> Side | None:
        """Return the deployment that a replica belongs to, None for neither."""
        known = self._sides.get(info.replica_id)
        if known is None or known[0] is not info:
            if len(self._sides) >= _REPLICAS:
                self._sides.clear()
            known = self._sides[info.replica_id] = (info, _side_at(self.settings, info))
        return known[1]

    def evidence(self) -> dict[str, float]:
        """Return what speaks against it, by test."""
        return {name: self.speaks_against(name) for name in _PARTS}

    def speaks_against(self, test: str) -> float:
        """Return what a test has against it, as a share of what makes it step back."""
        found: FailureTest | SignTest = getattr(self, test)
        return found.evidence * self.settings.false_alarm * _PARTS[test]

    def first_of(self, what: str, request: InferenceRequest, *, by_session: bool) -> bool:
        """Whether this is the first figure of its unit in a test; it is remembered as that."""
        if by_session and request.objective.session is None:
            return True
        key = (what, *_unit(request))
        if key in self._counted:
            return False
        self._counted[key] = None
        if len(self._counted) > _UNITS:
            self._counted.popitem(last=False)
        return True

    def compare(self, what: str, side: Side, value: float) -> bool:
        """Take a latency of either side, and return whether that told anything.

        Each one of the stable deployment is compared with once at most.
        """
        stable = self._stable[what]
        if side is Side.STABLE:
            stable.append(value)
            return False
        if not stable:
            return False
        if len(stable) % 2 == 0:
            stable.popleft()
        test: SignTest = getattr(self, what)
        test.shows(heads=value > self.settings.slower * median(stable))
        stable.clear()
        return True


class Canaries:
    """All canaries of a tier; one writer, the dispatcher.

    Args:
        stepped_back: called once for each canary that does.
    """

    def __init__(self, clock: Clock | None = None, stepped_back: Callable[[Canary], None] | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._stepped_back = stepped_back
        self._canaries: dict[str, Canary] = {}

    def __len__(self) -> int:
        return len(self._canaries)

    def __iter__(self) -> Iterator[Canary]:
        return iter(self._canaries.values())

    def reconfigure(self, settings: Sequence[CanarySettings]) -> None:
        """Put tables into force. One that did not change goes on as it was; a changed one begins anew.

        A weight alone may change without that, while the canary has not stepped back.
        """
        before, now_s = self._canaries, self._clock.now_s()
        self._canaries = {}
        for one in settings:
            known = before.get(one.name)
            if known is not None and _same(known, one):
                known.settings = one
                self._canaries[one.name] = known
            else:
                self._canaries[one.name] = Canary(one, now_s)

    def split(self, infos: Iterable[ReplicaInfo]) -> tuple[Canary, dict[Side, frozenset[str]]] | None:
        """Return the canary that replicas of one model are divided by, and their ids by side; None: they are not."""
        infos = list(infos)
        for canary in self._canaries.values():
            sides = [(canary.side_at(info), info.replica_id) for info in infos]
            ids = {side: frozenset(name for at, name in sides if at is side) for side in Side}
            if all(ids.values()):
                return canary, ids
        return None

    def failed(self, info: ReplicaInfo, request: InferenceRequest, sent_at_s: float) -> None:
        """An attempt failed."""
        for canary, side in self._concerned(info, request, sent_at_s):
            if canary.first_of("errors", request, by_session=False):
                canary.counts[side].failed += 1
                if 0.0 < canary.weight < 1.0:
                    canary.errors.failed(first=side is Side.CANARY, share=canary.weight)
                self._judge(canary, "errors")

    def first_token(self, info: ReplicaInfo, request: InferenceRequest, sent_at_s: float, took_s: float) -> None:
        """An attempt's first token came, `took_s` after it was sent; or its caller waited so long in vain.

        That is so on either side: the shorter of first token and patience is compared, which is as fair as the draw.
        """
        if not request.continuation:
            self._took("ttft", info, request, sent_at_s, took_s)

    def ended(self, info: ReplicaInfo, request: InferenceRequest, sent_at_s: float, pace_s: float | None) -> None:
        """A whole answer came, at so many seconds a token; None where nobody can tell."""
        for canary, side in self._concerned(info, request, sent_at_s):
            canary.counts[side].answered += 1
        if pace_s is not None:
            self._took("pace", info, request, sent_at_s, pace_s)

    def probed(self, canary: Canary, *, canary_good: bool, stable_good: bool) -> None:
        """A quality probe was answered by both sides."""
        if canary_good is not stable_good and not canary.why:
            canary.probes.shows(heads=stable_good)
            self._judge(canary, "probes")

    def _took(self, what: str, info: ReplicaInfo, request: InferenceRequest, sent_at_s: float, value: float) -> None:
        for canary, side in self._concerned(info, request, sent_at_s):
            if canary.first_of(what, request, by_session=True) and canary.compare(what, side, value):
                self._judge(canary, what)

    def _concerned(
        self, info: ReplicaInfo, request: InferenceRequest, sent_at_s: float
    ) -> Iterator[tuple[Canary, Side]]:
        """Yield the canaries that an attempt says something of: those where it ran on its own request's side."""
        for canary in self._canaries.values():
            if canary.why or sent_at_s < canary.began_s:
                continue
            side = canary.side_at(info)
            if side is not None and side is canary.side_of(request):
                yield canary, side

    def _judge(self, canary: Canary, by: str) -> None:
        if canary.speaks_against(by) >= 1.0:
            canary.by, canary.why = by, _why(canary, by)
            if self._stepped_back is not None:
                self._stepped_back(canary)


def _why(canary: Canary, by: str) -> str:
    settings, ours, theirs = canary.settings, canary.counts[Side.CANARY], canary.counts[Side.STABLE]
    chance = f"a chance of {settings.false_alarm * _PARTS[by]:.2g} at most, were it no worse"
    if by == "errors":
        figures = (
            f"{ours.failed} failed beside {ours.answered} answered, stable {theirs.failed} beside {theirs.answered}"
        )
        return f"errors: {figures}; {chance}"
    test: SignTest = getattr(canary, by)
    if by == "probes":
        return f"probes: {test.heads} failed here alone, {test.tails} on the stable deployment alone; {chance}"
    name = {"ttft": "first tokens", "pace": "seconds a token"}[by]
    total = test.heads + test.tails
    return f"{by}: {test.heads} of {total} {name} above {settings.slower:g} times the stable median; {chance}"


def _unit(request: InferenceRequest) -> tuple[str, ...]:
    """Name what is drawn for as one: the session, or the request where there is none."""
    session = request.objective.session
    return (request.caller, "request", request.request_id) if session is None else (request.caller, "session", session)


def _side_at(settings: CanarySettings, info: ReplicaInfo) -> Side | None:
    if settings.model not in ("", info.family, info.variant):
        return None
    if _matches(settings.canary, info):
        return Side.CANARY
    return Side.STABLE if _matches(settings.stable, info) else None


def _matches(pattern: DeploymentPattern, info: ReplicaInfo) -> bool:
    return all(
        not wanted or fnmatchcase(value, wanted)
        for wanted, value in (
            (pattern.backend, info.backend),
            (pattern.version, info.version),
            (pattern.variant, info.variant),
            (pattern.replica, info.replica_id),
        )
    )


def _same(canary: Canary, settings: CanarySettings) -> bool:
    """Whether a canary goes on under its new table."""
    old = canary.settings
    if canary.why:
        return old == settings
    fields = [name for name in old.__struct_fields__ if name != "weight"]
    return all(getattr(old, name) == getattr(settings, name) for name in fields)
