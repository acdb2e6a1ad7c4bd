"""When a server looks for garbage."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Iterator

import psutil
import pytest

from router.base.garbage import collect_while_few_wait, spare_what_was_imported
from router.base.host import libc


@contextlib.contextmanager
def collections_of(least_generation: int) -> Iterator[list[None]]:
    """One entry for each collection of that generation or an older one."""
    seen: list[None] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] >= least_generation:
            seen.append(None)

    gc.callbacks.append(collected)
    yield seen
    gc.callbacks.remove(collected)


@pytest.fixture
def full() -> Iterator[list[None]]:
    with collections_of(2) as seen:
        yield seen


@pytest.fixture
def young() -> Iterator[list[None]]:
    with collections_of(0) as seen:
        yield seen


async def for_a_while(waiting: int, at_latest_s: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(collect_while_few_wait(lambda: waiting, 0.01, at_latest_s), 0.2)


def test_collections_leave_out_what_was_there_before_the_server() -> None:
    before, pace = {"module": object()}, gc.get_threshold()
    try:
        spare_what_was_imported()
        since = [{}]
        assert gc.get_freeze_count() > 0
        assert any(each is since for each in gc.get_objects())
        assert not any(each is before for each in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.set_threshold(*pace)


@pytest.mark.skipif(libc() is None, reason="another C library keeps its heap in another way")
async def test_memory_that_a_crowd_has_left_is_given_back() -> None:
    """Freed in holes, the C library keeps it: `malloc` finds room in them for what is small alone."""
    heap = ctypes.CDLL("libc.so.6")
    heap.malloc.restype, heap.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [heap.malloc(60_000) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, 60_000)
    for block in blocks[:-1]:  # the last one holds the end of the heap in its place
        heap.free(block)
    resident = psutil.Process().memory_info().rss
    await for_a_while(waiting=0, at_latest_s=60.0)
    given_back = resident - psutil.Process().memory_info().rss
    heap.free(blocks[-1])
    assert given_back > 60_000_000


def test_what_a_request_needs_while_it_runs_is_no_reason_to_look(young: list[None]) -> None:
    pace = gc.get_threshold()
    try:
        spare_what_was_imported()
        young.clear()
        held = [[] for _ in range(4_000)]
        assert not young, f"{len(held)} objects are what a dozen requests have in hand"
    finally:
        gc.unfreeze()
        gc.set_threshold(*pace)


async def test_all_is_looked_through_while_few_wait(full: list[None]) -> None:
    await for_a_while(3, 100.0)
    assert full


async def test_nothing_stands_still_for_it_while_many_wait(full: list[None]) -> None:
    await for_a_while(10_000, 100.0)
    assert not full


async def test_it_is_not_put_off_for_ever(full: list[None]) -> None:
    await for_a_while(10_000, 0.05)
    assert full


async def test_the_interpreter_makes_no_full_collection_by_itself_meanwhile(full: list[None]) -> None:
    before = gc.get_threshold()
    work = asyncio.create_task(collect_while_few_wait(lambda: 10_000))
    await asyncio.sleep(0)
    held = [[] for _ in range(200_000)]
    assert not full, f"{len(held)} more objects would have been a reason for some"
    work.cancel()
    await asyncio.wait({work})
    assert gc.get_threshold() == before
