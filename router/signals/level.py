"""A log factor on a prior that is followed at two speeds, ages while nothing is seen, and is quick after a change.

    belief   = slow + fast                                   log of (as it is / as the prior says)
    error    = log(actual / predicted by the belief)         one observation
    belief  += gain · error;  gain = share · variance / (share² · variance + others' variance + noise)
    slow    += what of `fast` has held for a while

`gain` is Kalman's for one state and an observation of which this quantity makes up `share`. Unseen, `fast` goes back to
0 and the variance grows to `_STALE_VARIANCE`: what was slow for two minutes is believed to be as before soon after, and
the first new observations count for much. A change is found by a two-sided CUSUM of the errors in units of their own
noise (Page, "Continuous inspection schemes", 1954); the belief then moves to the mean of the errors since it began.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MAX_LOG: Final = math.log(8.0)
"""One observation counts as at most so many times off."""

# A prior is wrong by a factor of 2 (one standard deviation); a long-run level that was not seen for a while by 1.4.
_PRIOR_VARIANCE: Final = math.log(2.0) ** 2
_STALE_VARIANCE: Final = math.log(1.4) ** 2
_INITIAL_NOISE: Final = 0.3**2
_LEAST_NOISE: Final = 0.03**2
_MOST_NOISE: Final = 1.0
_NOISE_GAIN: Final = 0.05
# Lowest gain: follows what drifts too slowly for the CUSUM, at a twentieth of each error.
_LEAST_GAIN: Final = 0.05
# Gaps of so long are usual between two requests, and no reason to forget.
_GRACE_S: Final = 10.0
# Half-life of a passing deviation while unseen: a cloud that was slow is tried again within a minute.
_FAST_HALF_LIFE_S: Final = 25.0
# What has held for five minutes of observation is the long-run level, as after a change of power mode.
_SLOW_FOLLOWS_S: Final = 300.0
# Half-life of the long-run level while unseen: machines are changed overnight, not between two requests.
_SLOW_HALF_LIFE_S: Final = 6 * 3600.0
# So many first observations teach the long-run level directly: until then there is no other.
_SETTLING: Final = 20
# CUSUM for a shift of 1.5 standard deviations: found within 3 to 6 observations, a false alarm in about 2,000.
_ALLOWANCE: Final = 0.75
_ALARM: Final = 4.0
_MOST_DEVIATIONS: Final = 3.0


@dataclass(slots=True)
class _Cusum:
    """One side of the test.

    Attributes:
        errors: sum of the errors since `score` left 0; seen: how many.
    """

    sign: float
    score: float = 0.0
    errors: float = 0.0
    seen: int = 0

    def observe(self, deviations: float, error_log: float) -> bool:
        """Return whether a change is certain enough."""
        self.score += self.sign * deviations - _ALLOWANCE
        if self.score <= 0:
            self.clear()
            return False
        self.errors += error_log
        self.seen += 1
        return self.score > _ALARM

    def clear(self) -> None:
        self.score, self.errors, self.seen = 0.0, 0.0, 0


class Level:
    """One such quantity.

    Attributes:
        slow: the long-run level; fast: what the present adds to it.
        variance: of the belief; noise: of one observation.
        seen: observations so far; changes: changes found.
    """

    __slots__ = ("_at_s", "_best", "_down", "_up", "changes", "fast", "noise", "seen", "slow", "variance")

    def __init__(self) -> None:
        self.slow = 0.0
        self.fast = 0.0
        self.variance = _PRIOR_VARIANCE
        self.noise = _INITIAL_NOISE
        self.seen = 0
        self.changes = 0
        self._best = 0.0
        self._at_s = -math.inf
        self._up = _Cusum(1.0)
        self._down = _Cusum(-1.0)

    def log(self, now_s: float) -> float:
        """Return the belief at `now_s`, aged by the time since the last observation."""
        unseen_s = now_s - self._at_s
        if self.seen == 0 or unseen_s <= _GRACE_S:
            return self.slow + self.fast
        return self.slow * _kept(unseen_s, _SLOW_HALF_LIFE_S) + self.fast * _kept(unseen_s, _FAST_HALF_LIFE_S)

    def sigma(self, now_s: float) -> float:
        """Return the standard deviation, in logs, of the next observation about the belief."""
        variance = self.variance
        unseen_s = now_s - self._at_s
        if self.seen and unseen_s > _GRACE_S:
            kept = _kept(unseen_s, _FAST_HALF_LIFE_S)
            variance = max(variance, _STALE_VARIANCE + (variance - _STALE_VARIANCE) * kept * kept)
        return math.sqrt(variance + self.noise)

    def pessimism(self, now_s: float) -> float:
        """Return by how much, in logs, it is believed slower than it has been or was said to be; 0 if it is not."""
        return max(0.0, self.log(now_s) - min(self._best, self.slow))

    def observe(self, error_log: float, now_s: float, *, share: float = 1.0, others_variance: float = 0.0) -> None:
        """Learn from log(actual / predicted).

        Args:
            share: part of what was observed that this quantity makes up, in (0, 1].
            others_variance: what the beliefs about the other parts add to the error's variance.
        """
        self._age(now_s)
        error = min(max(error_log, -MAX_LOG), MAX_LOG)
        deviation = math.sqrt(share * share * self.variance + others_variance + self.noise)
        scaled = min(max(error / deviation, -_MOST_DEVIATIONS), _MOST_DEVIATIONS)
        rose, fell = self._up.observe(scaled, error), self._down.observe(scaled, error)
        if rose or fell:
            side = self._up if rose else self._down
            moved = side.errors / side.seen * share
            self.variance = self.noise / side.seen
            self.changes += 1
            self._up.clear()
            self._down.clear()
        else:
            gain = share * self.variance / (deviation * deviation)
            gain = max(gain, _LEAST_GAIN * share)
            moved = gain * error
            self.variance *= 1.0 - min(gain * share, 1.0)
        usual = _MOST_DEVIATIONS * math.sqrt(self.noise)
        clipped = min(max(error, -usual), usual)
        self.noise += _NOISE_GAIN * (clipped * clipped - self.noise)
        self.noise = min(max(self.noise, _LEAST_NOISE), _MOST_NOISE)
        self._move(moved, now_s)

    def _age(self, now_s: float) -> None:
        """Make the belief and its variance those of `now_s`."""
        unseen_s = now_s - self._at_s
        if self.seen == 0 or unseen_s <= _GRACE_S:
            return
        kept = _kept(unseen_s, _FAST_HALF_LIFE_S)
        self.fast *= kept
        self.variance = max(self.variance, _STALE_VARIANCE + (self.variance - _STALE_VARIANCE) * kept * kept)
        forgotten = _kept(unseen_s, _SLOW_HALF_LIFE_S)
        self.variance += _PRIOR_VARIANCE * (1.0 - forgotten * forgotten)
        self.slow *= forgotten

    def _move(self, moved_log: float, now_s: float) -> None:
        """Add to the belief, and let the long-run level follow it."""
        self.seen += 1
        since_s = now_s - self._at_s
        held_s = min(since_s, _GRACE_S)
        self._at_s = now_s
        follow = 1.0 - 0.5 ** (held_s / _SLOW_FOLLOWS_S)
        if self.seen <= _SETTLING:
            follow = max(follow, 1.0 / self.seen)
        total = min(max(self.slow + self.fast + moved_log, -2 * MAX_LOG), 2 * MAX_LOG)
        self.fast = total - self.slow
        shift = follow * self.fast
        self.slow += shift
        self.fast -= shift
        self._best = min(self.slow, self.slow + (self._best - self.slow) * 0.5 ** (since_s / _SLOW_HALF_LIFE_S))


def _kept(unseen_s: float, half_life_s: float) -> float:
    return math.pow(0.5, max(unseen_s - _GRACE_S, 0.0) / half_life_s)
