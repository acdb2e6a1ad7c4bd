"""Where replicas come from: a lifetime that publishes a changing set of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from router.values.credits import NOTHING_WANTED, Want
from router.values.replica import Replica
from router.values.settings import BreakerSettings

_DEFAULT_MISSES = BreakerSettings().failures


def _default_misses() -> int:
    return _DEFAULT_MISSES


def _nothing_wanted() -> Want:
    return NOTHING_WANTED


def new_instance() -> str:
    """Return a name for this start of a tier: it names no hardware."""
    return secrets.token_hex(16)


def _nobody(*_: object) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class SourceHooks:
    """Who hears of what a source finds out.

    Attributes:
        on_change: called when `replicas` has changed.
        probe_succeeded, probe_failed: called after each poll with the endpoint, and with the reason of a failure: the
            breaker's half-open probe that costs no request. A probe that failed while requests got answers is not told.
        want: asked for how many requests wait that may go upstream: what credits are asked for.
        misses_to_be_lost: asked for how many probes in a row have to fail before a server counts as unreachable:
            `router.breaker.failures`.
        instance: what this tier calls itself towards tiers above.
    """

    on_change: Callable[[], None] = _nobody
    probe_succeeded: Callable[[str], None] = _nobody
    probe_failed: Callable[[str, str], None] = _nobody
    misses_to_be_lost: Callable[[], int] = _default_misses
    want: Callable[[], Want] = _nothing_wanted
    instance: str = field(default_factory=new_instance)


class ReplicaSource(Protocol):
    """Use as `async with`: its replicas come and go until it is left.

    What it finds out goes to its `SourceHooks`. It may find nothing for a while; a replica that it still lists but that
    cannot be used now says so in its snapshot.
    """

    @property
    def who(self) -> str:
        """What to call it in messages, which strangers may read: as it is configured, without its address."""
        ...

    @property
    def where(self) -> str:
        """Its address or addresses, for operators."""
        ...

    @property
    def local(self) -> bool:
        """Whether its servers run on this very device."""
        ...

    @property
    def replicas(self) -> Sequence[Replica]:
        """The replicas that it has now, best first."""
        ...

    @property
    def unreached(self) -> str:
        """Why nothing is known of what it serves; empty once that is known."""
        ...

    def wanted(self) -> None:
        """Hear that a request has begun to wait, which may be for this source."""
        ...

    def lose(self, why: str) -> None:
        """End every stream from it, which then fails with `why`: the tier ends."""
        ...

    async def __aenter__(self) -> object:
        """Begin to look for replicas."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and close every connection."""
        ...
