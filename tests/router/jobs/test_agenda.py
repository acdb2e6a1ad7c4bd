"""Which line is next."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.jobs.agenda import Agenda
from router.jobs.records import Batch, BatchStatus, Line


def _batch(name: str, owner: str = "me", expires_s: int = 100) -> Batch:
    return Batch(name, owner, BatchStatus.IN_PROGRESS, "/v1/completions", "file", "24h", 1, expires_s)


def _lines(name: str, numbers: range) -> list[Line]:
    return [Line(name, number, f"{name}{number}", 0, 1) for number in numbers]


def _agenda(**batches: Batch) -> Agenda:
    agenda = Agenda()
    agenda.set(batches.values())
    for name in batches:
        agenda.add(name, _lines(name, range(1, 4)))
        agenda.add(name, [])
    return agenda


def _running(**lines: int) -> Counter[str | None]:
    counted: Counter[str | None] = Counter()
    counted.update(lines)
    return counted


def _all(agenda: Agenda, now_s: float = 0.0) -> list[str]:
    found = []
    while (line := agenda.take(now_s, Counter())) is not None:
        found.append(line.custom_id)
    return found


def test_callers_take_turns_and_of_one_the_batch_that_expires_first_goes_first() -> None:
    agenda = _agenda(late=_batch("late", expires_s=200), soon=_batch("soon"), other=_batch("other", owner="you"))
    found = _all(agenda)
    assert [name for name in found if not name.startswith("other")] == [
        *("soon1", "soon2", "soon3"),
        *("late1", "late2", "late3"),
    ]
    assert sorted(found[:6]).count("other1") == 1
    assert {name[:5] for name in found[:2]} == {"soon1"[:5], "other"}


def test_the_caller_who_has_fewest_running_is_next_and_kept_out_if_that_is_none() -> None:
    agenda = _agenda(a=_batch("a"), b=_batch("b", owner="you"))
    running = _running(me=2, you=1)
    for _ in range(2):
        line = agenda.take(0.0, running)
        assert line is not None
        assert agenda.owner_of(line) == "you"
    assert not agenda.kept_out(0.0, running)
    assert agenda.kept_out(0.0, _running(me=2))
    assert _all(agenda) == ["a1", "b3", "a2", "a3"]
    assert not agenda.kept_out(0.0, Counter())


def test_a_line_that_came_back_is_taken_when_it_is_due() -> None:
    agenda = _agenda(a=_batch("a"))
    first = agenda.take(0.0, Counter())
    assert first is not None
    agenda.back(first, 10.0)
    assert _all(agenda, 5.0) == ["a2", "a3"]
    (there,) = agenda
    assert not there.done
    assert _all(agenda, 10.0) == ["a1"]
    assert there.done


def test_what_is_read_again_is_read_from_the_start() -> None:
    agenda = _agenda(a=_batch("a"))
    _all(agenda)
    (there,) = agenda
    there.begin_again()
    assert (there.wants_more, there.read_to, there.done) == (True, 0, False)


def test_a_batch_that_ends_takes_its_lines_along() -> None:
    agenda = _agenda(a=_batch("a"), b=_batch("b"))
    agenda.set([_batch("b")])
    agenda.back(_lines("a", range(1, 2))[0], 0.0)
    assert _all(agenda) == ["b1", "b2", "b3"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_no_line_is_lost_or_given_out_twice(events: list[tuple[str, bool]]) -> None:
    agenda = _agenda(a=_batch("a"), b=_batch("b", owner="you"), c=_batch("c", expires_s=50))
    out: dict[str, Line] = {}
    ended: list[str] = []
    for _, comes_back in events:
        line = agenda.take(0.0, Counter())
        if line is None:
            break
        assert line.custom_id not in out
        assert line.custom_id not in ended
        if comes_back:
            agenda.back(line, 0.0)
        else:
            ended.append(line.custom_id)
    rest = _all(agenda)
    assert sorted(ended + rest) == sorted(f"{name}{number}" for name in "abc" for number in range(1, 4))
