"""Work beside the event loop: whose texts take long keeps nobody else's waiting."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from router.gateway.beside import LONG, Beside
from tests.support.waiting import until


class Work:
    """Work that waits until `gate` opens, and notes when it begins."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun: list[str] = []

    def __call__(self, name: str) -> str:
        self.begun.append(name)
        self.gate.wait(60)
        return name


@pytest.fixture
def held() -> Iterator[Work]:
    work = Work()
    yield work
    work.gate.set()


async def begun(work: Work, count: int) -> None:
    await until(lambda: len(work.begun) >= count)
    await asyncio.sleep(0.02)  # no more of them begin


async def test_whose_texts_are_long_keeps_nobody_waiting(held: Work) -> None:
    beside = Beside(cores=2)
    hog = [asyncio.ensure_future(beside.run("hog", LONG, lambda: held("hog"))) for _ in range(12)]
    hog += [asyncio.ensure_future(beside.run("hog", 100, lambda: held("hog"))) for _ in range(12)]
    await begun(held, 3)
    assert held.begun == ["hog"] * 3  # one long, two short
    assert await beside.run("other", 100, lambda: "short") == "short"
    assert await beside.run("other", LONG, lambda: "long") == "long"
    held.gate.set()
    assert await asyncio.gather(*hog) == ["hog"] * 24


async def test_callers_take_turns_and_each_ones_work_is_done_in_order() -> None:
    beside = Beside(cores=1)
    names = ["a0", "b0", "a1", "a2", "a3", "b1", "c1", "c2"]
    gates = {name: threading.Event() for name in names}
    begun: list[str] = []

    def work(name: str) -> str:
        begun.append(name)
        gates[name].wait(60)
        return name

    doing = [asyncio.ensure_future(beside.run(name[0], 100, lambda name=name: work(name))) for name in names]
    for ended in ("a0", "b0", "a1", "b1", "c1", "a2", "c2", "a3"):  # each once the one before has left its thread
        await until(lambda ended=ended: ended in begun)
        gates[ended].set()
        await doing[names.index(ended)]
    assert sorted(begun[:2]) == ["a0", "b0"]
    assert begun[2:] == ["a1", "b1", "c1", "a2", "c2", "a3"]


async def test_who_gives_up_leaves_the_line_and_no_place_is_lost(held: Work) -> None:
    beside = Beside(cores=1)
    running = asyncio.ensure_future(beside.run("a", 100, lambda: held("a0")))
    await begun(held, 1)
    waiting = [asyncio.ensure_future(beside.run("a", 100, lambda n=n: held(f"a{n}"))) for n in (1, 2, 3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    running.cancel()  # its thread goes on, and holds its place until it has ended
    await asyncio.wait([waiting[0], running])
    await asyncio.sleep(0.02)
    assert held.begun == ["a0"]
    held.gate.set()
    assert await asyncio.gather(*waiting[1:]) == ["a2", "a3"]
    assert held.begun == ["a0", "a2", "a3"]
    assert await beside.run("a", 100, lambda: "on") == "on"


async def test_a_turn_that_comes_as_its_caller_leaves_goes_to_the_next(held: Work) -> None:
    beside = Beside(cores=1)
    first = asyncio.ensure_future(beside.run("a", 100, lambda: held("a0")))
    await begun(held, 1)
    leaving = asyncio.ensure_future(beside.run("a", 100, lambda: held("a1")))
    staying = asyncio.ensure_future(beside.run("a", 100, lambda: held("a2")))
    await asyncio.sleep(0)
    held.gate.set()
    turn = beside._short._waiting["a"][0]
    turn.add_done_callback(lambda _: leaving.cancel())
    assert await first == "a0"
    assert await staying == "a2"
    assert leaving.cancelled()
    assert await beside.run("a", 100, lambda: "on") == "on"


async def test_work_that_fails_gives_its_place_back() -> None:
    def fails() -> str:
        raise ValueError("a reason")

    beside = Beside(cores=1)
    for _ in range(5):
        with pytest.raises(ValueError, match="a reason"):
            await beside.run("a", 100, fails)
    assert await beside.run("a", 100, lambda: "on") == "on"


async def test_a_process_that_may_have_no_more_threads_loses_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    beside = Beside(cores=1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await asyncio.wait_for(beside.run("a", 100, lambda: "off"), 5)
    assert await asyncio.wait_for(beside.run("a", 100, lambda: "on"), 5) == "on"


def test_threads_are_as_many_as_this_process_may_keep_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.gateway.beside.usable_cores", lambda: 5)  # of 64, in a container
    beside = Beside()
    assert (beside._short._threads._max_workers, beside._long._threads._max_workers) == (6, 3)
