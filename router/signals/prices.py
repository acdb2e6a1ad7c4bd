"""What a second of each device is worth while more is asked for than it can do, and which rung it had better run.

The last arrivals are offered to all devices at once: request j on device d is worth v_jd and takes c_jd device-seconds.
The value of what T seconds of every device can hold is bounded by the dual of a fractional knapsack,

    g(λ) = Σ_j max(0, max_d (v_jd − λ_d · c_jd)) + Σ_d λ_d · T,

whose minimum is approached from above: each step multiplies λ_d by a power of what is wanted of device d at these
prices over what it has (multiplicative weights), from the price that it would have alone (Dantzig, 1957). λ is 0 while
everything fits.

Rungs of one device that run side by side slow one another, so each device favours one rung: the combination of highest
g. Another one takes over when it is better by `_SWITCH_GAIN`: that is the hysteresis of stepping down and up again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from router.values.offer import Offer

Floats = NDArray[np.float64]

_KEPT = 192  # arrivals
_LEAST = 12  # before so many there is no price
_STALE_S = 5.0
_SPAN_S = 20.0  # older arrivals count only where there are few
_FEW = 32
_USABLE = 0.7  # share of a device's time that becomes kept answers: batches are not always full, nor promises kept
_STEPS = 40
_FIRST_STEP, _STEP_DECAY = 0.25, 0.96
_LEAST_PRICE = 1e-4
_SWITCH_GAIN = 1.05
_SOLVE_EVERY_S = 1.0
_SOLVE_AFTER = 4  # arrivals: fewer hardly move the prices of the last hundred
_MAX_COMBINATIONS = 32


class CapacityPrices:
    """Prices by device. One writer, the dispatcher.

    Attributes:
        version: counts changes of the prices, and of what is favoured.
    """

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self._device_of: dict[str, str] = {}
        self._values: Floats = np.zeros((_KEPT, 8))
        self._costs: Floats = np.full((_KEPT, 8), math.inf)
        self._at_s: Floats = np.zeros(_KEPT)
        self._next = 0
        self._seen = 0
        self.version = 0
        self._solved_at_s = -math.inf
        self._solved_seen = 0
        self._arrived_s = -math.inf
        self._prices: dict[str, float] = {}
        self._favoured: dict[str, str] = {}

    def arrived(self, now_s: float, offers: Sequence[Offer]) -> None:
        """Take one arrival into account; one without offers says nothing."""
        if not offers:
            return
        self._arrived_s = now_s
        row = self._next
        self._values[row] = 0.0
        self._costs[row] = math.inf
        for offer in offers:
            column = self._column(offer)
            self._values[row, column] = offer.value
            self._costs[row, column] = offer.cost_s
        self._at_s[row] = now_s
        self._next = (row + 1) % _KEPT
        self._seen += 1
        if now_s - self._solved_at_s >= _SOLVE_EVERY_S and self._seen - self._solved_seen >= _SOLVE_AFTER:
            self._solve(now_s)

    def age(self, now_s: float) -> None:
        """Forget the prices once nobody has come for `_STALE_S`: they were of those who then came."""
        if self._prices and now_s - self._arrived_s > _STALE_S:
            self._prices.clear()
            self.version += 1

    def price(self, device: str) -> float:
        """Value of one more second of a device; 0 while it has time left."""
        return self._prices.get(device, 0.0)

    def favours(self, device: str, replica_id: str) -> bool:
        """Whether a device had better run that rung; True where nothing speaks against it."""
        return self._favoured.get(device, replica_id) == replica_id

    def favoured(self) -> Mapping[str, str]:
        """The rung that each device had better run."""
        return self._favoured

    def keep_only(self, replica_ids: set[str]) -> None:
        """Forget replicas that are gone."""
        if self._columns.keys() <= replica_ids:
            return
        self._columns.clear()
        self._device_of.clear()
        self._seen = self._next = self._solved_seen = 0
        self._prices.clear()
        self._favoured.clear()
        self.version += 1

    def _column(self, offer: Offer) -> int:
        column = self._columns.get(offer.replica_id)
        if column is None:
            column = self._columns[offer.replica_id] = len(self._columns)
            self._device_of[offer.replica_id] = offer.device
            if column >= self._values.shape[1]:
                self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
                self._costs = np.concatenate([self._costs, np.full_like(self._costs, math.inf)], axis=1)
        return column

    def _solve(self, now_s: float) -> None:
        self._solved_at_s, self._solved_seen = now_s, self._seen
        known = min(self._seen, _KEPT)
        if known < _LEAST:
            return
        ages_s = now_s - self._at_s[:known]
        recent = ages_s <= _SPAN_S
        if recent.sum() < _FEW:
            recent = ages_s <= np.sort(ages_s)[min(_FEW, known) - 1]
        values, costs = self._values[:known][recent], self._costs[:known][recent]
        span_s = max(float(ages_s[recent].max()), 1e-3) if known < _KEPT or not recent.all() else float(ages_s.max())
        devices: dict[str, list[str]] = {}
        for replica_id, device in self._device_of.items():
            devices.setdefault(device, []).append(replica_id)
        names = list(devices)
        combinations = list(itertools.islice(itertools.product(*devices.values()), _MAX_COMBINATIONS))
        if not devices:
            return
        columns = np.array([[self._columns[replica_id] for replica_id in rungs] for rungs in combinations])
        gains, prices = _duals(values.T[columns], costs.T[columns], span_s * _USABLE)
        best = int(gains.argmax())
        held = tuple(self._favoured.get(name, "") for name in names)
        if held in combinations and gains[best] < gains[combinations.index(held)] * _SWITCH_GAIN:
            best = combinations.index(held)
        self._favoured = dict(zip(names, combinations[best], strict=True))
        self._prices = dict(zip(names, prices[best].tolist(), strict=True))
        self.version += 1


def _duals(values: Floats, costs: Floats, time_s: float) -> tuple[Floats, Floats]:
    """Return the duals' values, and their prices (combinations × devices).

    Args:
        values, costs: combinations × devices × requests; one that a device cannot serve costs infinitely.
        time_s: what every device has.
    """
    usable = np.where(np.isfinite(costs), costs, 1e9)
    prices = _alone(values, usable, time_s)
    best, found = np.full(len(values), math.inf), prices
    step = _FIRST_STEP
    gains = np.empty_like(usable)
    for _ in range(_STEPS if (prices > _LEAST_PRICE).any() else 1):  # one where any device could do all by itself
        np.multiply(prices[:, :, None], usable, out=gains)
        np.subtract(values, gains, out=gains)
        gained = np.maximum(gains.max(axis=1), 0.0)
        bound = gained.sum(axis=1) + prices.sum(axis=1) * time_s
        better = bound < best
        best, found = np.where(better, bound, best), np.where(better[:, None], prices, found)
        wanted = (usable * _served(gains, gained)).sum(axis=2)
        prices = np.maximum(prices, _LEAST_PRICE) * np.minimum(np.maximum(wanted / time_s, 0.1), 10.0) ** step
        step *= _STEP_DECAY
    return best, np.where(found > 2 * _LEAST_PRICE, found, 0.0)


def _served(gains: Floats, gained: Floats) -> NDArray[np.bool_]:
    """Say by which device each request is served: the one where it gains most, of equals the first, if it gains."""
    served: NDArray[np.bool_] = (gains == gained[:, None, :]) & (gains > 0.0)
    if served.sum() > (gained > 0.0).sum():
        served &= np.cumsum(served, axis=1) == 1
    return served


def _alone(values: Floats, costs: Floats, time_s: float) -> Floats:
    """Return the price of each device (combinations × devices) if it had to serve all by itself."""
    density = values / costs
    order = np.argsort(-density, axis=2)
    filled_s = np.cumsum(np.take_along_axis(costs, order, axis=2), axis=2)
    over = (filled_s < time_s).sum(axis=2, keepdims=True)
    last = np.minimum(over, density.shape[2] - 1)
    price = np.take_along_axis(np.take_along_axis(density, order, axis=2), last, axis=2)
    price = np.where(over < density.shape[2], np.maximum(price, _LEAST_PRICE), _LEAST_PRICE)
    alone: Floats = price[:, :, 0]
    return alone
