"""What a prompt costs on a replica, seconds = a + b · tokens: a line through the observed first tokens.

Fitted by least squares on relative errors with exponential forgetting, and held by the prior while little was seen.
"""

from __future__ import annotations

from typing import Final

from router.values.replica import SpeedPrior

# The shape of a line changes with the model and the machine alone; its level is followed apart from it (`level.py`).
_FORGET: Final = 0.97
_OUTLIER: Final = 4.0  # one observation moves the line as if it were at most this many times off
_PRIOR_AT_TOKENS = (16.0, 1024.0)
_PRIOR_WEIGHT: Final = 0.5
# Prior of `a`: accepting, sampling and detokenizing, on any replica.
_OVERHEAD_S: Final = 0.005
_MIN_OVERHEAD_S: Final = 0.0005


class PrefillLine:
    """seconds = a + b · tokens, learned online."""

    def __init__(self, prior: SpeedPrior) -> None:
        self._prior_a = _OVERHEAD_S
        self._prior_b = 1.0 / prior.prefill_tokens_per_s
        self.a_s = self._prior_a
        self.b_s = self._prior_b
        self._seen = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # w, wx, wxx, wy, wxy

    def predict(self, tokens: float) -> float:
        return self.a_s + self.b_s * tokens

    def observe(self, tokens: float, seconds: float) -> None:
        expected_s = self.predict(tokens)
        y = min(max(seconds, expected_s / _OUTLIER), expected_s * _OUTLIER)
        weight = 1.0 / (expected_s * expected_s)
        w, wx, wxx, wy, wxy = self._sums
        self._sums = (
            _FORGET * w + weight,
            _FORGET * wx + weight * tokens,
            _FORGET * wxx + weight * tokens * tokens,
            _FORGET * wy + weight * y,
            _FORGET * wxy + weight * tokens * y,
        )
        self._seen += 1
        self._fit()

    def _fit(self) -> None:
        w, wx, wxx, wy, wxy = self._sums
        trust = _PRIOR_WEIGHT * max(0.1, 1.0 / (1.0 + self._seen / 4.0))
        for x in _PRIOR_AT_TOKENS:  # weighted by today's estimate, or a prior far off would hold for ever
            weight = trust / self.predict(x) ** 2
            weight_x, y = weight * x, self._prior_a + self._prior_b * x
            w += weight
            wx += weight_x
            wxx += weight_x * x
            wy += weight * y
            wxy += weight_x * y
        determinant = w * wxx - wx * wx
        if determinant <= 1e-12 * w * wxx:
            return
        a_s = (wy * wxx - wx * wxy) / determinant
        b_s = (w * wxy - wx * wy) / determinant
        if a_s < _MIN_OVERHEAD_S:
            a_s, b_s = _MIN_OVERHEAD_S, max(wxy - _MIN_OVERHEAD_S * wx, 0.0) / wxx
        elif b_s < self._prior_b / 50:
            b_s = self._prior_b / 50
            a_s = max((wy - b_s * wx) / w, _MIN_OVERHEAD_S)
        self.a_s, self.b_s = a_s, b_s
