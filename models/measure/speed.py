"""Decode and prefill rates of several artifacts in one run, turn by turn, so that all meet the same noise."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from models.measure.runner import OnnxRunner


@dataclass(frozen=True)
class Case:
    """One kind of step: `batch` sequences feed `new` tokens each after `past` others."""

    name: str
    batch: int
    past: int
    new: int

    @property
    def tokens(self) -> int:
        return self.batch * self.new


CASES = (
    Case("decode, batch 1", batch=1, past=256, new=1),
    Case("decode, batch 4", batch=4, past=256, new=1),
    Case("prefill 512", batch=1, past=1, new=512),
)


@dataclass(frozen=True)
class Rate:
    """Tokens a second: the median over all turns, and the middle half of them."""

    tokens_per_s: float
    low_tokens_per_s: float
    high_tokens_per_s: float


def race(runners: Mapping[str, OnnxRunner], cases: tuple[Case, ...] = CASES, turns: int = 12) -> dict[str, list[Rate]]:
    """Time every runner in every case, interleaved; rates in the order of `cases`.

    A decode turn is 4 steps, a prefill turn is one. Inputs are fixed noise: the time of a step does not depend on it.
    """
    rates: dict[str, list[Rate]] = {name: [] for name in runners}
    for case in cases:
        steps = 4 if case.new == 1 else 1
        feeds = {name: _feeds(runner, case) for name, runner in runners.items()}
        times: dict[str, list[float]] = {name: [] for name in runners}
        for turn in range(turns + 1):
            for name, runner in runners.items():
                begin = time.perf_counter()
                for _ in range(steps):
                    runner.session.run(None, feeds[name])
                if turn:  # the first one warms up
                    times[name].append((time.perf_counter() - begin) / steps)
        for name, seen in times.items():
            low, high = np.quantile(seen, (0.75, 0.25))
            rates[name].append(Rate(case.tokens / median(seen), case.tokens / float(low), case.tokens / float(high)))
    return rates


def _feeds(runner: OnnxRunner, case: Case) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shape = (runner.num_layers, case.batch, runner.num_kv_heads, case.past, runner.head_dim)
    past = (random.standard_normal(shape, np.float32), random.standard_normal(shape, np.float32))
    ids = random.integers(0, runner.vocab_size, (case.batch, case.new))
    feeds = runner.feeds(ids, past, np.full(case.batch, case.past, np.int64))
    feeds["logits_at"] = np.full((case.batch, 1), case.new - 1, np.int64)
    return feeds
