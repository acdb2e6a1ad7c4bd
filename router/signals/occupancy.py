"""What a replica has to do, from its last report and from what this tier has sent it since."""

from __future__ import annotations

from collections.abc import Sequence

from router.values.prediction import Demand, InFlightLoad, SiblingLoad
from router.values.replica import ReplicaSnapshot

# Age at which a remote load figure has half of its weight; requests of this tier keep theirs.
_STALE_HALF_LIFE_S = 5.0


def sibling_load(snapshot: ReplicaSnapshot, mine: InFlightLoad) -> SiblingLoad:
    """Return what a replica has, as the other rungs of its device meet it."""
    return SiblingLoad(
        snapshot.info,
        occupied=occupied_slots(snapshot, mine),
        slots=max(snapshot.slots, 1),
        left_tokens=left_tokens(snapshot, mine),
        prefill_tokens=backlog_tokens(snapshot, mine),
    )


def occupied_slots(snapshot: ReplicaSnapshot, mine: InFlightLoad) -> int:
    """Count the sequences on a replica: the larger of its report and of what this tier has sent."""
    return max(round((snapshot.running + snapshot.queued) * fresh(snapshot)) + mine.unopened, mine.requests)


def left_tokens(snapshot: ReplicaSnapshot, mine: InFlightLoad) -> Sequence[int]:
    """Return what each sequence of a replica still generates, ascending: known for this tier's own, else spread."""
    occupied = occupied_slots(snapshot, mine)
    if len(mine.left_tokens) >= occupied:
        return mine.left_tokens
    pending = snapshot.pending_decode_tokens * fresh(snapshot) + mine.unopened_decode_tokens
    return _spread_evenly(pending, occupied)


def fresh(snapshot: ReplicaSnapshot) -> float:
    """Return the weight of a report, in (0, 1]; it halves every `_STALE_HALF_LIFE_S`."""
    return 1.0 if snapshot.age_s <= 0 else 0.5 ** (snapshot.age_s / _STALE_HALF_LIFE_S)


def backlog_tokens(snapshot: ReplicaSnapshot, mine: InFlightLoad) -> float:
    """Count the prompt tokens that a replica has taken in and not computed."""
    return max(snapshot.queued_prefill_tokens * fresh(snapshot) + mine.unopened_prefill_tokens, mine.prefill_tokens)


def interference(snapshot: ReplicaSnapshot, mine: InFlightLoad) -> float:
    """Return the factor by which the answers that run slow a prompt down."""
    running = min(occupied_slots(snapshot, mine), max(snapshot.slots, 1) - 1)
    return 1.0 + snapshot.info.prior.decode_batch_slope * max(running, 0)


def line_tokens(snapshot: ReplicaSnapshot, demand: Demand, mine: InFlightLoad) -> float:
    """Count the tokens to prefill before the first token, queued ones included, scaled by the running batch."""
    own = max(demand.prompt_tokens - demand.cached_tokens, 1)
    return (backlog_tokens(snapshot, mine) + own) * interference(snapshot, mine)


def _spread_evenly(pending_tokens: float, requests: int) -> Sequence[int]:
    """Remainders of requests of which only the sum is known: evenly spread over twice their mean."""
    if requests <= 0:
        return ()
    mean = pending_tokens / requests
    return [round(2.0 * mean * (index + 1) / (requests + 1)) for index in range(requests)]
