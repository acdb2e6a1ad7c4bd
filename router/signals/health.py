"""Whether a replica may be asked at all: breakers by endpoint, and cool-downs after a refusal."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from router.base.clock import Clock
from router.signals.breaker import Breaker, BreakerState
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.settings import BreakerSettings

# Longest cool-down, in seconds, whatever time to come back the refusal gave.
_MAX_COOLING_S = 30.0
_MIN_COOLING_S = 0.05
_TRIAL_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class Health:
    """What keeps requests from a replica that calls itself available.

    Attributes:
        code: a code of `router.dispatch.records.record.REJECTIONS`, empty when nothing does.
        again_s: seconds until that may have passed.
        waits: it is worth waiting for, rather than refusing a request for which nothing else is left.
        up_to_priority: it speaks against requests of this priority and below only, None for all.
    """

    code: str = ""
    text: str = ""
    again_s: float = 0.0
    waits: bool = False
    up_to_priority: int | None = None

    def against(self, priority: int) -> bool:
        """Whether it speaks against a request of that priority."""
        return bool(self.code) and (self.up_to_priority is None or priority <= self.up_to_priority)


FINE = Health()


@dataclass(frozen=True, slots=True)
class _CoolDown:
    """A replica refused at `refused_s` and is asked again at `until_s`, by priorities up to `up_to_priority`."""

    refused_s: float
    until_s: float
    up_to_priority: int | None

    def covers(self, up_to_priority: int | None) -> bool:
        """Whether it keeps all away that another one up to that priority would."""
        return self.up_to_priority is None or (up_to_priority is not None and up_to_priority <= self.up_to_priority)


class HealthBook:
    """Breakers and cool-downs of a tier."""

    def __init__(
        self, settings: BreakerSettings, clock: Clock, on_change: Callable[[str, BreakerState, str], None]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._on_change = on_change
        self._breakers: dict[str, Breaker] = {}
        self._cooling: dict[str, _CoolDown] = {}  # by replica id

    def breaker(self, info: ReplicaInfo) -> Breaker:
        return self.breaker_of(breaker_key(info))

    def breaker_of(self, key: str) -> Breaker:
        if key not in self._breakers:
            self._breakers[key] = Breaker(key, self._settings, self._clock, self._on_change)
        return self._breakers[key]

    def has_failed(self, source: str) -> bool:
        """Whether a request of this source has failed lately, on any endpoint; see `blame.source_of`."""
        return any(breaker.knows(source) for breaker in self._breakers.values())

    def is_sound(self, info: ReplicaInfo) -> bool:
        """Whether the breaker of a replica is closed."""
        breaker = self._breakers.get(breaker_key(info))
        return breaker is None or breaker.state is BreakerState.CLOSED

    def breaker_told(self, info: ReplicaInfo) -> tuple[BreakerState, str]:
        """Return the state of a replica's breaker, and what opened it; one that nothing was heard of is closed."""
        breaker = self._breakers.get(breaker_key(info))
        state = BreakerState.CLOSED if breaker is None else breaker.state
        return state, "" if breaker is None or state is BreakerState.CLOSED else breaker.why

    def refused(self, info: ReplicaInfo, retry_after_s: float, up_to_priority: int | None = None) -> None:
        """Begin the cool-down of a replica that refused and said when to come back.

        Args:
            up_to_priority: the refusal speaks for requests of this priority and below, None for all. The widest one in
                force counts.
        """
        now_s = self._clock.now_s()
        known = self._cooling.get(info.replica_id)
        if known is None or now_s >= known.until_s or not known.covers(up_to_priority) or up_to_priority is None:
            until_s = now_s + min(max(retry_after_s, _MIN_COOLING_S), _MAX_COOLING_S)
            self._cooling[info.replica_id] = _CoolDown(now_s, until_s, up_to_priority)

    def of(self, snapshot: ReplicaSnapshot) -> Health:
        """Return the health of a replica. A later load report with a free slot ends a remote cool-down."""
        info = snapshot.info
        breaker = self._breakers.get(breaker_key(info))
        if breaker is not None and not breaker.allows():
            why = breaker.why or "requests failed"
            if breaker.state is BreakerState.HALF_OPEN:
                return Health("breaker-open", f"it is being tried again: {why}", _TRIAL_WAIT_S, waits=True)
            return Health("breaker-open", why, breaker.opens_for_s)
        cooling = self._cooling.get(info.replica_id)
        if cooling is None:
            return FINE
        now_s = self._clock.now_s()
        room = snapshot.running + snapshot.queued < snapshot.slots
        news = info.remote and now_s - snapshot.age_s > cooling.refused_s and room
        if now_s >= cooling.until_s or news:
            del self._cooling[info.replica_id]
            return FINE
        left_s = cooling.until_s - now_s
        return Health(
            "cooling-down",
            f"refused a request; to be asked again in {left_s:.1f} s",
            left_s,
            waits=True,
            up_to_priority=cooling.up_to_priority,
        )

    def states(self) -> dict[str, str]:
        return {key: breaker.state.value for key, breaker in self._breakers.items()}

    def set_settings(self, settings: BreakerSettings) -> None:
        self._settings = settings
        for breaker in self._breakers.values():
            breaker.settings = settings

    def keep_only(self, infos: Collection[ReplicaInfo]) -> None:
        """Forget the cool-downs of all other replicas. Breakers stay: an endpoint may come back."""
        ids = {info.replica_id for info in infos}
        self._cooling = {key: value for key, value in self._cooling.items() if key in ids}


def breaker_key(info: ReplicaInfo) -> str:
    """Return the breaker's key: the endpoint of a remote replica, the id of a local one."""
    return info.endpoint if info.remote else info.replica_id
