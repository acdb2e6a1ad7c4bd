"""What a replica has to do, from its last report and from what this tier has sent it since."""

# ruff: noqa: FURB136 - done for every candidate of every decision, where each call of `max` counts
from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.values.prediction import Demand, InFlightLoad, SiblingLoad
from router.values.replica import ReplicaSnapshot

# Age at which a remote load figure has half of its weight; requests of this tier keep theirs.
_STALE_HALF_LIFE_S: Final = 5.0


def sibling_load(snapshot: ReplicaSnapshot, mine: InFlightLoad, occupied: int) -> SiblingLoad:
    """Return what a replica has, as the other rungs of its device meet it.

    Args:
        occupied: its `occupied_slots`.
    """
    return SiblingLoad(
        snapshot.info,
        occupied=occupied,
        slots=max(snapshot.slots, 1),
        left_tokens=left_tokens(snapshot, mine, occupied),
        prefill_tokens=backlog_tokens(snapshot, mine),
        awaited=mine.awaited,
    )


def occupied_slots(snapshot: ReplicaSnapshot, mine: InFlightLoad) -> int:
    """Count the sequences on a replica: the larger of its report and of what this tier has sent."""
    there = snapshot.running + snapshot.queued
    if snapshot.age_s > 0 and there:
        there = round(there * fresh(snapshot))
    there += mine.unopened
    return there if there > mine.requests else mine.requests


def left_tokens(snapshot: ReplicaSnapshot, mine: InFlightLoad, occupied: int) -> Sequence[int]:
    """Return what each sequence of a replica still generates, ascending: known for this tier's own, else spread.

    Args:
        occupied: its `occupied_slots`.
    """
    if len(mine.left_tokens) >= occupied:
        return mine.left_tokens
    pending = snapshot.pending_decode_tokens * fresh(snapshot) + mine.unopened_decode_tokens
    return _spread_evenly(pending, occupied)


def fresh(snapshot: ReplicaSnapshot) -> float:
    """Return the weight of a report, in (0, 1]; it halves every `_STALE_HALF_LIFE_S`."""
    return 1.0 if snapshot.age_s <= 0 else 0.5 ** (snapshot.age_s / _STALE_HALF_LIFE_S)


def backlog_tokens(snapshot: ReplicaSnapshot, mine: InFlightLoad) -> float:
    """Count the prompt tokens that a replica has taken in and not computed."""
    told = float(snapshot.queued_prefill_tokens)
    if told and snapshot.age_s > 0:
        told *= fresh(snapshot)
    told += mine.unopened_prefill_tokens
    return told if told > mine.prefill_tokens else mine.prefill_tokens


def line_tokens(snapshot: ReplicaSnapshot, demand: Demand, mine: InFlightLoad, scale: float) -> float:
    """Count the tokens to prefill before the first token, queued ones included.

    Args:
        scale: by how much the answers that run slow a prompt down.
    """
    return (backlog_tokens(snapshot, mine) + max(demand.prompt_tokens - demand.cached_tokens, 1)) * scale


def _spread_evenly(pending_tokens: float, requests: int) -> Sequence[int]:
    """Remainders of requests of which only the sum is known: evenly spread over twice their mean."""
    if requests <= 0:
        return ()
    mean = pending_tokens / requests
    return [round(2.0 * mean * (index + 1) / (requests + 1)) for index in range(requests)]
