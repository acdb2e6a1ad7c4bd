"""Counters and histograms as plain numbers, on one event loop: the library's own take a lock for each event.

What is shown is the library's: its families are asked for at a scrape, and hold these numbers. They are collectors of
the library without being derived from its `Collector`: so they can be compiled.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample


class Count:
    """What was counted since the last scrape."""

    __slots__ = ("_child", "_new")

    def __init__(self, child: Counter) -> None:
        self._child = child
        self._new = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self._new += amount

    def hand_over(self) -> None:
        new, self._new = self._new, 0.0
        if new:
            self._child.inc(new)


class Counts:
    """A counter that is brought up to date when somebody asks for it."""

    def __init__(self, metric: Counter) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], Count] = {}

    def labels(self, *values: str) -> Count:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = Count(self._metric.labels(*values) if values else self._metric)
        return child

    def collect(self) -> Iterable[Metric]:
        for child in self._children.values():
            child.hand_over()
        families: Iterable[Metric] = self._metric.collect()
        return families

    def describe(self) -> Iterable[Metric]:
        """Name the counter."""
        families: Iterable[Metric] = self._metric.describe()
        return families


class Observations:
    """How many lay up to each bound and above the one before, and their sum."""

    __slots__ = ("_bounds", "_numbers", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._numbers = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self._numbers[bisect_left(self._bounds, value)] += 1
        self.total += value

    def up_to(self, bound: float) -> float:
        """Count those up to a bound; infinity: all of them."""
        return float(sum(self._numbers[: bisect_right(self._bounds, bound) + (bound == math.inf)]))


class Histograms:
    """A histogram whose samples are counted here.

    Args:
        bounds: of its buckets, but for the infinite one.
    """

    def __init__(self, metric: Histogram, bounds: Sequence[float]) -> None:
        self._metric = metric
        self._bounds = bounds
        self._children: dict[tuple[str, ...], Observations] = {}

    def labels(self, *values: str) -> Observations:
        child = self._children.get(values)
        if child is None:
            if values:
                self._metric.labels(*values)  # it is shown from now on
            child = self._children[values] = Observations(self._bounds)
        return child

    def collect(self) -> Iterable[Metric]:
        for family in self._metric.collect():
            family.samples = [self._told(sample) for sample in family.samples]
            yield family

    def _told(self, sample: Sample) -> Sample:
        child = self.labels(*[value for name, value in sample.labels.items() if name != "le"])
        kind = sample.name.rpartition("_")[2]
        if kind == "bucket":
            return sample._replace(value=child.up_to(float(sample.labels["le"])))
        if kind == "count":
            return sample._replace(value=child.up_to(math.inf))
        return sample._replace(value=child.total) if kind == "sum" else sample

    def describe(self) -> Iterable[Metric]:
        """Name the histogram."""
        families: Iterable[Metric] = self._metric.describe()
        return families
