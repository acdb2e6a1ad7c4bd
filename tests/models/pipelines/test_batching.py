"""Who is computed together: invariants over random arrivals, and the rules one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.pipelines.batching import Batch, BatchSettings, Waiting


@dataclass(eq=False)
class Input:
    cost: int = 4
    rank: int = 0
    arrived_s: float = 0.0
    priority: int = 0
    due_s: float = math.inf
    over: bool = False
    size_bytes: int = 0


def waiting(*items: Input, **settings: object) -> Waiting[Input]:
    line: Waiting[Input] = Waiting(BatchSettings(**settings))  # type: ignore[arg-type]
    for item in items:
        line.add(item)
    return line


def taken(line: Waiting[Input], now_s: float = 0.0) -> list[Input]:
    batch = line.take(now_s)
    assert isinstance(batch, Batch)
    return list(batch.items)


inputs = st.builds(
    Input,
    cost=st.integers(1, 300),
    rank=st.integers(0, 100),
    arrived_s=st.floats(0, 10),
    priority=st.integers(-2, 2),
    due_s=st.one_of(st.just(math.inf), st.floats(0, 20)),
    over=st.booleans(),
)


@given(
    st.lists(inputs, max_size=40),
    st.integers(1, 8),
    st.integers(0, 600),
    st.sampled_from([(), (8, 64, 256), (16,)]),
    st.floats(0, 50),
)
def test_everybody_is_computed_once_within_the_bounds(
    items: list[Input], size: int, bound: int, buckets: tuple[int, ...], wait_ms: float
) -> None:
    line = waiting(*items, max_size=size, max_cost=bound, buckets=buckets, max_wait_ms=wait_ms)
    seen: list[Input] = []
    while (found := line.take(1e6)) != math.inf:
        assert isinstance(found, Batch)
        assert 1 <= len(found.items) <= size
        assert all(item.cost <= found.size for item in found.items)
        assert len(found.items) == 1 or not bound or found.cost <= bound
        fitting = [next((b for b in buckets if b >= item.cost), None) for item in found.items]
        assert len(set(fitting)) == 1  # nobody is padded beyond its own bucket
        seen += found.items
    assert len(line) == 0
    assert sorted(map(id, seen)) == sorted(id(item) for item in items if not item.over)


@given(st.lists(inputs, min_size=1, max_size=20), st.floats(0, 12))
def test_who_waits_is_never_lost_and_the_wait_is_bounded(items: list[Input], now_s: float) -> None:
    items = [item for item in items if not item.over]
    line = waiting(*items, max_size=64, max_wait_ms=1000)
    found = line.take(now_s)
    if isinstance(found, Batch):
        assert set(map(id, found.items)) <= set(map(id, items))
        assert len(found.items) + len(line) == len(items)
    else:
        assert len(line) == len(items)
        oldest_s = min((item.arrived_s for item in items), default=math.inf)
        assert found == math.inf if not items else found <= oldest_s + 1.0 - now_s + 1e-9


def test_priority_goes_first_then_the_deadline_then_who_came_first() -> None:
    late, soon, first, urgent = Input(arrived_s=0.2), Input(due_s=0.5), Input(arrived_s=0.1), Input(priority=1)
    line = waiting(late, soon, first, urgent)
    assert [taken(line)[0] for _ in range(4)] == [urgent, soon, first, late]


def test_a_request_of_many_inputs_takes_turns() -> None:
    many = [Input(rank=rank) for rank in range(100)]
    line = waiting(*many, max_size=10)
    assert taken(line) == many[:10]
    newcomer = Input(arrived_s=0.01)
    line.add(newcomer)
    assert newcomer in taken(line)


def test_what_is_left_of_many_is_not_starved_by_newcomers() -> None:
    many = [Input(rank=rank) for rank in range(20)]
    line = waiting(*many, max_size=10)
    taken(line)
    for step in range(100):
        for _ in range(10):
            line.add(Input(arrived_s=step / 100))
        if many[10] in taken(line, step / 100):
            break
    assert step / 100 < 0.2


def test_an_idle_worker_waits_for_company_but_not_for_ever() -> None:
    line = waiting(Input(), max_size=4, max_wait_ms=10)
    assert line.take(0.0) == pytest.approx(0.010)
    assert line.take(0.004) == pytest.approx(0.006)
    line.add(Input(arrived_s=0.005))
    assert line.take(0.005) == pytest.approx(0.005)  # the oldest counts
    assert len(taken(line, 0.010)) == 2


def test_a_full_batch_goes_at_once() -> None:
    line = waiting(*(Input() for _ in range(4)), max_size=4, max_wait_ms=10)
    assert len(taken(line)) == 4


def test_nobody_waits_beyond_a_deadline_that_company_would_cost() -> None:
    line = waiting(Input(due_s=0.100), max_size=4, max_wait_ms=1000)
    for _ in range(20):
        line.pace.took(4, 0.020)
        line.pace.took(8, 0.040)
    wait_s = line.take(0.0)
    assert isinstance(wait_s, float)
    assert wait_s + line.pace.expected_s(8) == pytest.approx(0.100)
    assert len(taken(line, 0.050)) == 1


def test_a_batch_is_no_larger_than_its_earliest_deadline_allows() -> None:
    line = waiting(*(Input(due_s=0.100) for _ in range(64)), max_size=64)
    for _ in range(40):
        for cost in (4, 8, 16, 32, 64, 128, 256):
            line.pace.took(cost, 0.001 * cost)
    first = taken(line, 0.0)
    assert 0.5 * 0.050 < line.pace.expected_s(4 * len(first)) <= 0.050
    assert len(taken(line, 0.099)) == 1  # hopeless, but never nothing: its stage says that it is too late


def test_buckets_ascend() -> None:
    with pytest.raises(ValueError, match="ascend"):
        BatchSettings(buckets=(16, 8))
