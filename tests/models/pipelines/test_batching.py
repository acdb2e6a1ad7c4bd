"""Who is computed together: invariants over random arrivals, and the rules one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.pipelines.batching import Batch, BatchSettings, Waiting


@dataclass(eq=False)
class Input:
    cost: int = 4
    arrived_s: float = 0.0
    priority: int = 0
    due_s: float = math.inf
    over: bool = False
    size_bytes: int = 0
    ticket: object = field(default_factory=object)


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


class Leaving(Input):
    """Its sender leaves between two looks at it: that is told by another thread."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "over":
            self.looks += 1
            return self.looks > 1
        return super().__getattribute__(name)


def test_who_leaves_while_it_is_looked_at_takes_no_worker_along() -> None:
    line = waiting(Leaving(), max_size=4)
    assert line.take(0.0) == math.inf
    assert (len(line), line.size_bytes) == (0, 0)
    other = Input(arrived_s=1.0)
    line = waiting(Leaving(), other, max_size=1)
    assert taken(line) == [other]


def test_priority_goes_first_then_the_deadline_then_who_came_first() -> None:
    late, soon, first, urgent = Input(arrived_s=0.2), Input(due_s=0.5), Input(arrived_s=0.1), Input(priority=1)
    line = waiting(late, soon, first, urgent)
    assert [taken(line)[0] for _ in range(4)] == [urgent, soon, first, late]


def of_one_request(count: int, **given: object) -> list[Input]:
    ticket = object()
    return [Input(ticket=ticket, **given) for _ in range(count)]  # type: ignore[arg-type]


def test_a_request_of_many_inputs_takes_turns() -> None:
    many = of_one_request(100)
    line = waiting(*many, max_size=10)
    assert taken(line) == many[:10]
    newcomer = Input(arrived_s=0.01)
    line.add(newcomer)
    assert newcomer in taken(line)


@pytest.mark.parametrize("deadline_s", [math.inf, 0.25])
@pytest.mark.parametrize("batch_s", [0.01, 0.35])
def test_who_comes_while_many_are_computed_waits_for_one_batch_of_them(batch_s: float, deadline_s: float) -> None:
    """However long each batch takes, and however long ago the many came."""
    many = of_one_request(400)
    line, now_s = waiting(*many, max_size=10, buckets=(8, 16)), 0.0
    for _ in range(20):
        now_s += batch_s
        assert all(item in many for item in taken(line, now_s))
        newcomer = Input(arrived_s=now_s, due_s=now_s + deadline_s)
        line.add(newcomer)
        assert newcomer in taken(line, now_s + batch_s / 2)


def test_what_comes_of_a_request_after_all_of_it_was_taken_has_a_turn_of_its_own() -> None:
    """Its texts are tokenized piece by piece, and may be computed as fast; some place of it is still known as empty."""
    first, *later = of_one_request(40)
    line = waiting(Input(priority=1), first, max_size=2)
    assert len(taken(line)) == 2
    for step in range(1, 19):
        newcomer = Input(arrived_s=float(step))
        line.add(newcomer)
        for item in later[2 * step : 2 * step + 2]:
            item.arrived_s = step + 0.5
            line.add(item)
        assert taken(line, step + 0.6)[0] is newcomer
        taken(line, step + 0.7)
    assert len(line) == 0


def test_turns_hold_for_all_lengths_of_a_request() -> None:
    """Its texts stand in several lines, by their length: it takes one turn in all of them together."""
    many = of_one_request(10, cost=8)
    many += [replace(item, cost=cost) for item in many for cost in (16, 32, 64)]
    line = waiting(*many, max_size=10, buckets=(8, 16, 32, 64))
    taken(line)
    newcomers = [Input(arrived_s=0.01, cost=128) for _ in range(3)]
    for newcomer in newcomers:
        line.add(newcomer)
    assert taken(line, 0.02) == newcomers


@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans(), inputs), min_size=1, max_size=12),
    st.integers(1, 8),
    st.sampled_from([(), (8, 64, 256)]),
    st.sampled_from(["bucket", "longest", "nothing"]),
    st.floats(1e-6, 0.1),
)
def test_everybody_of_every_request_is_computed_once(
    requests: list[tuple[int, bool, Input]], size: int, buckets: tuple[int, ...], pads_to: str, token_s: float
) -> None:
    items = [
        replace(one, cost=1 + (one.cost * number) % 300, size_bytes=number)
        for count, mixed, one in requests
        for number in range(1, count + 1)
    ]
    line = paced(waiting(max_size=size, buckets=buckets, pads_to=pads_to), lambda cost: token_s * cost)
    now_s, seen, left = 0.0, [], list(items)
    while left or len(line):
        for item in left[:7]:
            line.add(item)
        del left[:7]
        assert line.size_bytes == sum(item.size_bytes for item in line._lines)
        found = line.take(now_s)
        if isinstance(found, Batch):
            seen += found.items
            now_s += 0.01
        else:
            now_s += min(found, 1.0)
    assert sorted(map(id, seen)) == sorted(id(item) for item in items if not item.over)
    assert (len(line), line.size_bytes, line._lines._turns) == (0, 0, {})


def test_a_batch_that_would_take_long_is_no_larger_than_it_pays() -> None:
    """Whoever comes meanwhile waits for its end: texts of 256 tokens gain nothing from company on a CPU."""
    line = paced(waiting(*of_one_request(16, cost=256), max_size=16), lambda cost: 1e-4 * cost)
    assert len(taken(line)) == 2  # four would take more than 0.1 s
    gaining = paced(waiting(*of_one_request(16, cost=256), max_size=16), lambda cost: 0.5 + 1e-5 * cost)
    assert len(taken(gaining)) == 16
    short = paced(waiting(*of_one_request(16, cost=7), max_size=16), lambda cost: 1e-4 * cost)
    assert len(taken(short)) == 16


def test_what_is_left_of_many_is_not_starved_by_newcomers() -> None:
    many = of_one_request(20)
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
    assert 0.5 * 0.075 < line.pace.expected_s(4 * len(first)) <= 0.075


def test_who_is_late_whatever_happens_makes_no_batch_small() -> None:
    late, others = [Input(due_s=0.001) for _ in range(3)], [Input(due_s=1.0) for _ in range(13)]
    line = paced(waiting(*late, *others, max_size=16), lambda cost: 0.02 + 1e-4 * cost)
    assert taken(line) == [*late, *others]


def test_those_in_a_hurry_go_first_and_alone_where_the_others_can_wait() -> None:
    soon, others = [Input(due_s=0.0075) for _ in range(2)], [Input(due_s=0.1) for _ in range(14)]
    line = paced(waiting(*soon, *others, max_size=16), lambda cost: 0.0004 * cost)
    assert taken(line) == soon
    assert taken(line) == others


def test_under_load_batches_do_not_shrink_for_those_who_are_nearly_late() -> None:
    """64 callers who ask again at once, and batches that pay: each that is late must not make the next ones late."""
    now_s, answered, in_time = 0.0, 0, 0
    line = paced(waiting(*(Input(due_s=0.25) for _ in range(64)), max_size=32), lambda cost: 0.03 + 0.0005 * cost)
    while now_s < 20.0:
        items = taken(line, now_s)
        now_s += 0.03 + 0.0005 * 4 * len(items)
        answered += len(items)
        in_time += sum(item.due_s >= now_s for item in items)
        for _ in items:
            line.add(Input(arrived_s=now_s, due_s=now_s + 0.25))
    assert answered / now_s > 0.8 * 32 / (0.03 + 0.0005 * 4 * 32)
    assert in_time > 0.8 * answered


def paced(line: Waiting[Input], seconds: Callable[[int], float]) -> Waiting[Input]:
    for power in range(14):
        line.pace.took(1 << power, seconds(1 << power))
    return line


def test_a_long_one_does_not_pad_the_short_ones_where_that_costs_more() -> None:
    short = [Input(cost=130, arrived_s=step / 100) for step in range(15)]
    long = Input(cost=256, arrived_s=0.07)
    line = paced(waiting(*short, long, max_size=16, pads_to="longest", buckets=(256,)), lambda cost: 1e-5 * cost)
    first = line.take(0.2)
    assert isinstance(first, Batch)
    assert (list(first.items), first.size) == (short, 130)
    assert taken(line, 0.2) == [long]


def test_who_goes_first_is_computed_first_also_where_it_is_long() -> None:
    short, long = [Input(cost=130, arrived_s=0.1) for _ in range(15)], Input(cost=256)
    line = paced(waiting(*short, long, max_size=16, pads_to="longest", buckets=(256,)), lambda cost: 1e-5 * cost)
    assert taken(line, 0.2) == [long]
    assert set(map(id, taken(line, 0.2))) == set(map(id, short))


@pytest.mark.parametrize("pads_to", ["longest", "bucket"])
def test_lengths_share_a_batch_where_each_batch_costs_much(pads_to: str) -> None:
    mixed = [Input(cost=cost) for cost in (130, 256, 140, 250)]
    seconds = {"longest": lambda _: 0.01, "bucket": lambda cost: 1e-5 * cost}[pads_to]
    line = paced(waiting(*mixed, max_size=16, pads_to=pads_to, buckets=(256,)), seconds)
    assert set(map(id, taken(line))) == set(map(id, mixed))


def test_lengths_share_a_batch_where_padding_is_not_computed() -> None:
    """It costs what its items do; of the memory it takes what they take padded."""
    mixed = [Input(cost=cost) for cost in (130, 256, 140, 250)]
    line = paced(waiting(*mixed, max_size=16, pads_to="nothing", buckets=(256,)), lambda cost: 1e-5 * cost)
    batch = line.take(0.0)
    assert isinstance(batch, Batch)
    assert (set(map(id, batch.items)), batch.size, batch.cost) == (set(map(id, mixed)), None, 776)
    bounded = waiting(*mixed, max_size=16, max_cost=512, pads_to="nothing", buckets=(256,))
    assert [len(taken(bounded)) for _ in range(2)] == [2, 2]


@given(
    st.lists(inputs, min_size=1, max_size=40),
    st.integers(1, 16),
    st.floats(0, 1e-2),
    st.floats(1e-7, 1e-5),
)
def test_apart_is_never_slower_and_the_first_is_always_in(
    items: list[Input], size: int, each_s: float, token_s: float
) -> None:
    items = [replace(item, due_s=math.inf) for item in items if not item.over]
    settings = {"max_size": size, "pads_to": "longest"}
    line = paced(waiting(*items, **settings), lambda cost: each_s + token_s * cost)
    seen: list[Input] = []
    while len(line):
        gathered, _ = line._gathered(line._lines.line(0), 0)
        line._lines.put_back(gathered, 0)
        batch = line.take(1e6)
        assert isinstance(batch, Batch)
        assert gathered[0] in batch.items
        assert batch.size == max(item.cost for item in batch.items)
        others = [item for item in gathered if item not in batch.items]
        if others:
            apart_s = line.pace.expected_s(batch.cost)
            apart_s += line.pace.expected_s(len(others) * max(item.cost for item in others))
            together = len(gathered) * max(item.cost for item in gathered)
            assert apart_s <= line.pace.expected_s(together)
        seen += batch.items
    assert sorted(map(id, seen)) == sorted(map(id, items))


def test_buckets_ascend() -> None:
    with pytest.raises(ValueError, match="ascend"):
        BatchSettings(buckets=(16, 8))
