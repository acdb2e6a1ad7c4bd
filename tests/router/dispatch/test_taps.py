"""Text that goes past its reader: nobody is woken for a token, and nothing else about the answer changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import OverspillError
from router.values.chunk import FinishReason, TokenChunk
from router.values.replica import Give
from router.values.request import InferenceRequest
from tests.support.router_fakes import FakeReplica, World, answer, request, world


class Pushing(FakeReplica):
    """Gives its text to whoever takes it; `given` counts what was taken."""

    given = 0
    at_once = 1

    async def push(self, request: InferenceRequest, give: Give) -> AsyncGenerator[TokenChunk, None]:
        held: list[TokenChunk] = []
        async for chunk in self.generate(request):
            if chunk.text and chunk.finish_reason is None:
                held.append(chunk)
                if len(held) < self.at_once:
                    continue
                if give(held):
                    self.given += len(held)
                    held = []
                    continue
            for one in held:
                yield one
            if chunk not in held:
                yield chunk
            held = []


class Notes:
    """A tap, and the reader beside it: what came, in the order in which it came."""

    def __init__(self, full: tuple[int, ...] = ()) -> None:
        self.text = ""
        self.read = self.taken = 0
        self.finish: FinishReason | None = None
        self.refused: set[int] = set(full)

    @property
    def full(self) -> bool:
        return self.read + self.taken in self.refused

    def give(self, chunks: list[TokenChunk]) -> None:
        self.taken += len(chunks)
        self.text += "".join([chunk.text for chunk in chunks])

    async def follow(self, w: World, ask: InferenceRequest, *, tapped: bool, away: tuple[int, ...] = ()) -> None:
        running = await w.dispatcher.start(ask)
        try:
            async for chunk in running.chunks:
                self.read += 1
                self.text += chunk.text
                self.finish = chunk.finish_reason
                if tapped:
                    running.chunks.tap(self)  # type: ignore[attr-defined]
                if self.read in away:
                    await w.clock.sleep(0.1)
        finally:
            await running.chunks.aclose()


class Crashing(Notes):
    def give(self, chunks: list[TokenChunk]) -> NoReturn:
        raise ZeroDivisionError


def as_pushing(w: World, **changes: Any) -> None:
    """Make pushing replicas of all."""
    for replica in w.all:
        replica.__class__ = Pushing
        for name, value in changes.items():
            setattr(replica, name, value)


def told(w: World, ask: InferenceRequest) -> dict[str, Any]:
    record = w.record(ask.request_id)
    return {name: record[name] for name in ("outcome", "error", "tokens", "events", "finish_ms", "ttft_ms")}


SCRIPTS: list[dict[str, Any]] = [
    {},
    {"faults": [("break", 5)]},
    {"faults": [("stall", 5)]},
    {"faults": [("break", 0), ("break", 7)]},
    {"faults": [("silent", 5)]},
    {"faults": [("stall", 5)], "deadline_s": 1.3},
    {"slower": 20.0, "deadline_s": 2.0},
    {"answer_tokens": 90, "max_tokens": 12},
    {"faults": [("empty", 5)]},
]


@pytest.mark.parametrize("script", SCRIPTS, ids=[" ".join(s) or "whole" for s in SCRIPTS])
async def test_a_tapped_answer_is_the_one_that_is_read(script: dict[str, Any]) -> None:
    found = []
    for tapped in (False, True):
        async with world(stall_timeout_ms=1000.0) as w:
            as_pushing(w)
            wishes = {name: script[name] for name in ("deadline_s", "max_tokens") if name in script}
            w.local.faults = list(script.get("faults", []))
            w.local.slower, w.local.answer_tokens = script.get("slower", 1.0), script.get("answer_tokens", 24)
            ask, notes = request(w.clock, **{"max_tokens": 20, **wishes}), Notes()
            await w.clock.run(notes.follow(w, ask, tapped=tapped))
            w.nothing_is_held()
            found.append((notes.text, notes.finish, told(w, ask)))
            assert (notes.taken > 0) is tapped
            assert notes.taken + notes.read < 100
    assert found[0] == found[1]


async def test_what_came_at_once_is_given_at_once_and_its_reader_sleeps() -> None:
    async with world(remote=False) as w:
        as_pushing(w, at_once=3)
        notes = Notes()
        await w.clock.run(notes.follow(w, request(w.clock, max_tokens=16, ignore_eos=True), tapped=True))
        assert notes.text == answer(16)
        assert notes.taken == 12, "all but the first three, and what the end came with"
        assert w.local.given == 12


async def test_without_a_tap_all_is_read() -> None:
    async with world(remote=False) as w:
        as_pushing(w)
        assert (await w.clock.run(w.ask(max_tokens=8)))[1] == answer(8)
        assert w.local.given == 0


@pytest.mark.parametrize("breaks", [True, False], ids=["a tap that crashes", "a tap that refuses"])
async def test_a_tap_that_fails_ends_the_answer_and_blames_no_replica(*, breaks: bool) -> None:
    async with world(remote=False) as w:
        as_pushing(w)
        ask, notes = request(w.clock, max_tokens=8), Notes(full=() if breaks else tuple(range(100)))
        if breaks:
            notes = Crashing()
            with pytest.raises(ZeroDivisionError):
                await w.clock.run(notes.follow(w, ask, tapped=True))
        else:
            await w.clock.run(notes.follow(w, ask, tapped=True))
            assert (notes.text, notes.taken) == (answer(8), 0)
        w.nothing_is_held()
        record = w.record(ask.request_id)
        assert record["outcome"] == ("failed" if breaks else "completed")
        assert w.dispatcher.breaker_states().get("local") in {None, "closed"}


async def test_a_replica_that_ignores_its_cap_is_cut_there() -> None:
    async with world(remote=False) as w:
        as_pushing(w)

        async def rambles(_: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
            for index in range(50):
                await w.clock.sleep(0.01)
                yield TokenChunk(f"w{index} ")
            yield TokenChunk("", 0, finish_reason=FinishReason.STOP)

        w.local.generate = rambles
        ask, notes = request(w.clock, max_tokens=10), Notes()
        await w.clock.run(notes.follow(w, ask, tapped=True))
        assert (notes.text.split(), notes.finish) == (answer(10).split(), FinishReason.LENGTH)
        w.nothing_is_held()


@given(
    fault=st.one_of(st.none(), st.tuples(st.sampled_from(["break", "stall", "empty", "silent"]), st.integers(0, 12))),
    full=st.lists(st.integers(0, 40), max_size=20),
    away=st.lists(st.integers(1, 20), max_size=5),
    at_once=st.integers(1, 4),
    deadline_s=st.one_of(st.none(), st.floats(0.3, 3.0)),
)
async def test_whoever_takes_it_nothing_is_lost_doubled_or_late(
    fault: tuple[str, int] | None, full: list[int], away: list[int], at_once: int, deadline_s: float | None
) -> None:
    async with world(stall_timeout_ms=500.0) as w:
        as_pushing(w, at_once=at_once)
        w.local.faults = [fault]
        ask, notes = request(w.clock, max_tokens=20, deadline_s=deadline_s), Notes(tuple(full))
        try:
            await w.clock.run(notes.follow(w, ask, tapped=True, away=tuple(away)))
        except OverspillError:
            assert notes.finish is None
        else:
            assert notes.finish is not None
        tokens = len(notes.text.split())
        assert notes.text == answer(tokens)
        assert tokens == w.record(ask.request_id)["tokens"]
        assert tokens == 20 or deadline_s is not None
        w.nothing_is_held()
