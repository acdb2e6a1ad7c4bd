"""The cache of answers as a tier opens it, and what it does, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.base.clock import Clock
from router.cache.exact import AnswerCache
from router.cache.settings import CacheSettings
from router.values.replica import ReplicaInfo


def open_cache(
    settings: CacheSettings, clock: Clock, models: Callable[[], Sequence[ReplicaInfo]], registry: CollectorRegistry
) -> AnswerCache | None:
    """Return the cache of a tier, shown in its metrics; None where none is configured.

    Args:
        models: the replicas that there are now.
    """
    if not settings.max_mbytes:
        return None
    cache = AnswerCache(settings, clock, models)
    registry.register(CacheMetrics(cache))
    return cache


class CacheMetrics(Collector):
    """Read when the page is asked for."""

    def __init__(self, cache: AnswerCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        cache = self._cache
        asked = CounterMetricFamily(
            "overspill_answer_cache_requests", "Repeatable requests, by whether an answer was there.", labels=["result"]
        )
        asked.add_metric(["hit"], cache.hits)
        asked.add_metric(["similar"], cache.similar)
        asked.add_metric(["miss"], cache.misses - cache.similar)
        yield asked
        yield CounterMetricFamily("overspill_answer_cache_kept", "Answers that were kept.", value=cache.kept)
        yield CounterMetricFamily("overspill_answer_cache_evicted", "Those that gave way.", value=cache.evicted)
        yield GaugeMetricFamily("overspill_answer_cache_answers", "Answers held now.", value=len(cache))
        yield GaugeMetricFamily("overspill_answer_cache_bytes", "What they take, about.", value=cache.size_bytes)
