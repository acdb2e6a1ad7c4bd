"""What a second of each device is worth while more is asked for than it can do, and which rung it had better run.

The last arrivals are offered to all devices at once: request j on device d is worth v_jd and takes c_jd device-seconds.
The value of what T seconds of every device can hold is bounded by the dual of a fractional knapsack,

    g(λ) = Σ_j max(0, max_d (v_jd − λ_d · c_jd)) + Σ_d λ_d · T,

whose minimum is found one device at a time: λ_d is the density (v_jd − best elsewhere) / c_jd at which those denser fill
T (Dantzig, 1957). λ is 0 while everything fits.

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
_SPAN_S = 20.0  # older arrivals count only where there are few
_FEW = 32
_USABLE = 0.95  # share of a device's time that work can fill
_ROUNDS = 6
_SWITCH_GAIN = 1.05
_SOLVE_EVERY_S = 1.0
_MAX_COMBINATIONS = 32


class CapacityPrices:
    """Prices by device. One writer, the dispatcher."""

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self._device_of: dict[str, str] = {}
        self._values: Floats = np.zeros((_KEPT, 8))
        self._costs: Floats = np.full((_KEPT, 8), math.inf)
        self._at_s: Floats = np.zeros(_KEPT)
        self._next = 0
        self._seen = 0
        self._solved_at_s = -math.inf
        self._prices: dict[str, float] = {}
        self._favoured: dict[str, str] = {}

    def arrived(self, now_s: float, offers: Sequence[Offer]) -> None:
        """Take one arrival into account."""
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
        if now_s - self._solved_at_s >= _SOLVE_EVERY_S:
            self._solve(now_s)

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
        self._seen = self._next = 0
        self._prices.clear()
        self._favoured.clear()

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
        self._solved_at_s = now_s
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
        best: tuple[float, tuple[str, ...], Floats] | None = None
        held: tuple[float, tuple[str, ...], Floats] | None = None
        for combination in itertools.islice(itertools.product(*devices.values()), _MAX_COMBINATIONS):
            columns = [self._columns[replica_id] for replica_id in combination]
            gain, prices = _dual(values[:, columns], costs[:, columns], span_s * _USABLE)
            found = (gain, combination, prices)
            if best is None or gain > best[0]:
                best = found
            if combination == tuple(self._favoured.get(name, "") for name in names):
                held = found
        if best is None:
            return
        if held is not None and best[0] < held[0] * _SWITCH_GAIN:
            best = held
        self._favoured = dict(zip(names, best[1], strict=True))
        self._prices = dict(zip(names, (float(price) for price in best[2]), strict=True))


def _dual(values: Floats, costs: Floats, time_s: float) -> tuple[float, Floats]:
    """Return the dual's value and its prices.

    Args:
        values, costs: of requests (rows) on devices (columns).
        time_s: what every device has.
    """
    devices = values.shape[1]
    prices = np.zeros(devices)
    usable = np.where(np.isfinite(costs), costs, 1e9)
    for _ in range(_ROUNDS if devices > 1 else 1):
        for d in range(devices):
            gains = values - prices * usable
            gains[:, d] = 0.0
            elsewhere = np.maximum(gains.max(axis=1), 0.0)
            density = (values[:, d] - elsewhere) / usable[:, d]
            order = np.argsort(-density)
            filled = np.cumsum(usable[order, d])
            over = int(np.searchsorted(filled, time_s))
            prices[d] = max(float(density[order[over]]), 0.0) if over < len(order) else 0.0
    gain = np.maximum((values - prices * usable).max(axis=1), 0.0).sum() + prices.sum() * time_s
    return float(gain), prices
