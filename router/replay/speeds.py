"""How fast the replicas of a log really were, from what its requests took.

The model is the one that simulates (`router.simulation.device`). On one device, with `s` the seconds of one decode step
alone and `p` the seconds of a prompt token, for each rung `r`:

    first token → end of an answer of n tokens  =  (n − 1) · Σ_r s_r · g_r  +  Σ_r p_r · (prompts prefilled meanwhile)
    arrival → first token                       =  Σ_r p_r · (prompts prefilled meanwhile, its own included)

`g_r` is the mean over that time of 1 + slope_r · (b_r − 1) while b_r > 0 sequences of `r` decode, else of 0.
All are linear in `s` and `p`: weighted least squares on relative errors, begun at and held by what the router had
learnt, so that a rung of which little was seen keeps that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from router.replay.log import LoggedReplica, LoggedRequest

_ROUNDS = 6
_HELD = 0.5
_MOST_ATTEMPTS = 20_000  # of a device; the latest of a longer log
_OUTLIER = 8.0
_LEAST_TOKENS = 8  # a pace over fewer is rounding
_LEAST_RESIDUALS = 20
_MOST_SIGMA = 1.0
_MAD_TO_SIGMA = 1.4826

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Speed:
    """One rung's speed.

    Attributes:
        prefill_tokens_per_s: with the device for itself.
        step_s: one decode step, batch 1.
        answers: from how many it was measured; 0: as the router had learnt it, or as it was declared.
    """

    prefill_tokens_per_s: float
    step_s: float
    answers: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """Attempts on one device, in order of their first token; arrays of one entry each, seconds on the device."""

    rung: npt.NDArray[np.int64]
    prompt: Array
    arrived: Array
    first: Array
    ended: Array
    tokens: Array


def speeds_of(
    replicas: Mapping[str, LoggedReplica], requests: Sequence[LoggedRequest]
) -> tuple[dict[str, Speed], float]:
    """Return speeds by replica id, and the noise: standard deviation of a request's log time around them."""
    devices: dict[str, list[str]] = {}
    for name, replica in replicas.items():
        devices.setdefault(replica.device, []).append(name)
    speeds: dict[str, Speed] = {}
    residuals: list[float] = []
    for names in devices.values():
        rungs = [replicas[name] for name in names]
        seen = _attempts_on(names, rungs, requests)
        begun = np.array([_learnt_step_s(r) for r in rungs] + [_learnt_prefill_s(r) for r in rungs])
        fitted = begun
        if seen is not None:
            coefficients, seconds = _equations(seen, rungs)
            fitted = _solve(coefficients, seconds, begun)
            residuals += np.log(seconds / (coefficients @ fitted)).tolist()
        for index, name in enumerate(names):
            answers = 0 if seen is None else int((seen.rung == index).sum())
            speeds[name] = Speed(1.0 / float(fitted[len(names) + index]), float(fitted[index]), answers)
    sigma = _spread(residuals)
    to_median = math.exp(-(sigma**2) / 2)  # least squares gives means; noise is told around the median
    return {
        name: Speed(speed.prefill_tokens_per_s / to_median, speed.step_s * to_median, speed.answers)
        if speed.answers
        else speed
        for name, speed in speeds.items()
    }, sigma


def link_of(replica: LoggedReplica) -> tuple[float, float] | None:
    """Return round trip and uplink (seconds, bytes a second) as learnt, None for a replica without a link."""
    if not replica.rtts_s:
        return None
    return median(replica.rtts_s), median(replica.uplinks_bytes_per_s)


def _learnt_step_s(replica: LoggedReplica) -> float:
    return median(replica.steps_s) if replica.steps_s else 1.0 / (replica.row.decode_tokens_per_s or 1.0)


def _learnt_prefill_s(replica: LoggedReplica) -> float:
    return median(replica.prefills_s) if replica.prefills_s else 1.0 / (replica.row.prefill_tokens_per_s or 1.0)


def _attempts_on(
    names: Sequence[str], rungs: Sequence[LoggedReplica], requests: Sequence[LoggedRequest]
) -> _Seen | None:
    """Collect the attempts that brought a token, with the network's part taken off."""
    index_of = {name: index for index, name in enumerate(names)}
    links = [link_of(rung) or (0.0, math.inf) for rung in rungs]
    rows = []
    for request in requests:
        for attempt in request.attempts:
            rung = index_of.get(attempt.replica)
            if rung is None or attempt.first_s is None:
                continue
            rtt_s, uplink = links[rung]
            arrived_s = attempt.sent_s + rtt_s / 2 + request.prompt_bytes / uplink
            first_s = max(attempt.first_s - rtt_s / 2, arrived_s)
            ended_s = max(attempt.ended_s - rtt_s / 2, first_s)
            # Of one that was continued elsewhere, nobody knows how many tokens came from here.
            tokens = request.tokens if len(request.attempts) == 1 else 0
            rows.append((rung, request.prompt_tokens, arrived_s, first_s, ended_s, tokens))
    if not rows:
        return None
    rows.sort(key=lambda row: row[3])
    columns = np.array(rows[-_MOST_ATTEMPTS:], dtype=np.float64).T
    return _Seen(columns[0].astype(np.int64), *columns[1:])


def _equations(seen: _Seen, rungs: Sequence[LoggedReplica]) -> tuple[Array, Array]:
    """Return coefficients of (s…, p…) a row, and the seconds that were observed."""
    count = len(rungs)
    growth = _mean_growth(seen, [rung.row.decode_batch_slope or 0.0 for rung in rungs])
    prompts = np.zeros((len(seen.first) + 1, count))  # prefilled up to and with the i-th first token
    np.add.at(prompts, (np.arange(1, len(seen.first) + 1), seen.rung), seen.prompt)
    prompts = prompts.cumsum(axis=0)

    paced = (seen.tokens >= _LEAST_TOKENS) & (seen.ended > seen.first)
    until = np.searchsorted(seen.first, seen.ended, side="right")
    own = np.arange(1, len(seen.first) + 1)
    pace_rows = np.hstack([growth * (seen.tokens[:, None] - 1), prompts[np.maximum(until, own)] - prompts[own]])

    # What was under way when it arrived is counted by the part that was left; prefills run one after the other.
    begins = np.maximum(seen.arrived, np.concatenate([[-np.inf], seen.first[:-1]]))
    after = np.searchsorted(seen.first, seen.arrived, side="right")
    after = np.minimum(after, own - 1)
    waited = prompts[own] - prompts[after]
    spans = np.maximum(seen.first - begins, 1e-12)
    begun = np.clip((seen.arrived - begins[after]) / spans[after], 0.0, 1.0) * (after < own - 1)
    waited[np.arange(len(own)), seen.rung[after]] -= begun * seen.prompt[after]
    slots = max(rung.slots for rung in rungs)
    here = np.searchsorted(np.sort(seen.arrived), seen.arrived, side="left") - np.searchsorted(
        np.sort(seen.ended), seen.arrived, side="right"
    )
    prompt = (here < slots) & (seen.first > seen.arrived)
    first_rows = np.hstack([np.zeros((len(own), count)), waited])

    coefficients = np.vstack([pace_rows[paced], first_rows[prompt]])
    seconds = np.concatenate([(seen.ended - seen.first)[paced], (seen.first - seen.arrived)[prompt]])
    sound = coefficients.sum(axis=1) > 0
    return coefficients[sound], seconds[sound]


def _mean_growth(seen: _Seen, slopes: Sequence[float]) -> Array:
    """Return for each attempt and rung the mean of 1 + slope · (b − 1) over its decode, 0 where b is 0."""
    times = np.unique(np.concatenate([seen.first, seen.ended]))
    mean = np.zeros((len(seen.first), len(slopes)))
    lasted = np.maximum(seen.ended - seen.first, 1e-12)
    for rung, slope in enumerate(slopes):
        mine = seen.rung == rung
        batch = np.searchsorted(np.sort(seen.first[mine]), times, side="right") - np.searchsorted(
            np.sort(seen.ended[mine]), times, side="right"
        )
        growth = np.where(batch > 0, 1.0 + slope * (batch - 1), 0.0)
        integral = np.concatenate([[0.0], np.cumsum(growth[:-1] * np.diff(times))])
        mean[:, rung] = (np.interp(seen.ended, times, integral) - np.interp(seen.first, times, integral)) / lasted
    return mean


def _solve(coefficients: Array, seconds: Array, begun: Array) -> Array:
    found: Array = begun
    hold = _HELD * np.diag(1.0 / begun)
    for _ in range(_ROUNDS):
        expected = np.maximum(coefficients @ found, 1e-9)
        observed = np.clip(seconds, expected / _OUTLIER, expected * _OUTLIER)
        rows = np.vstack([coefficients / expected[:, None], hold])
        wanted = np.concatenate([observed / expected, np.full(len(begun), _HELD)])
        solved = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        found = np.minimum(np.maximum(solved, begun / 50.0), begun * 50.0)
    return found


def _spread(residuals: Sequence[float]) -> float:
    """Return a robust standard deviation of log errors."""
    if len(residuals) < _LEAST_RESIDUALS:
        return 0.0
    middle = median(residuals)
    return min(_MAD_TO_SIGMA * median(abs(value - middle) for value in residuals), _MOST_SIGMA)
