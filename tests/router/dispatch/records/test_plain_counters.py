"""Numbers of our own under the library's names."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from router.dispatch.records.plain_counters import Counts, Histograms

BOUNDS = (0.01, 0.5, 1.0, 30.0)
values = st.lists(st.tuples(st.sampled_from(["edge", "cloud"]), st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.0, 99.0])))


def told(registry: CollectorRegistry) -> list[str]:
    """Both formats, but for when a series began."""
    text = generate_latest(registry).decode() + generate_openmetrics(registry).decode()  # type: ignore[no-untyped-call]
    return [re.sub(r"(_created\{?.*) \S+$", r"\1", line) for line in text.splitlines()]


@given(values, st.booleans())
def test_a_histogram_shows_what_the_librarys_own_would(observed: list[tuple[str, float]], labelled: bool) -> None:
    names = ["tier"] if labelled else []
    own, theirs = CollectorRegistry(), CollectorRegistry()
    histograms = Histograms(Histogram("some_seconds", "Some.", names, registry=None, buckets=BOUNDS), BOUNDS)
    own.register(histograms)
    library = Histogram("some_seconds", "Some.", names, registry=theirs, buckets=BOUNDS)
    for tier, value in observed:
        if labelled:
            histograms.labels(tier).observe(value)
            library.labels(tier).observe(value)
        else:
            histograms.labels().observe(value)
            library.observe(value)
    assert told(own) == told(theirs)


@given(values)
def test_a_counter_shows_what_the_librarys_own_would(counted: list[tuple[str, float]]) -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts(Counter("some", "Some.", ["tier"], registry=None))
    own.register(counts)
    library = Counter("some", "Some.", ["tier"], registry=theirs)
    for tier, value in counted:
        counts.labels(tier).inc(value)
        library.labels(tier).inc(value)
        told(own)  # a scrape in between takes nothing away
    assert told(own) == told(theirs)


def test_scrapes_in_between_change_no_histogram() -> None:
    histograms = Histograms(Histogram("some_seconds", "Some.", [], registry=None, buckets=BOUNDS), BOUNDS)
    registry = CollectorRegistry()
    registry.register(histograms)
    for _ in range(3):
        histograms.labels().observe(0.3)
        generate_latest(registry)
    assert registry.get_sample_value("some_seconds_bucket", {"le": "0.5"}) == 3
    assert registry.get_sample_value("some_seconds_bucket", {"le": "0.01"}) == 0
    assert registry.get_sample_value("some_seconds_count") == 3
