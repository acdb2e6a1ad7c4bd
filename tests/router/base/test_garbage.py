"""When a server looks for garbage."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator

import pytest

from router.base.garbage import collect_while_few_wait, spare_what_was_imported


@pytest.fixture
def full() -> Iterator[list[None]]:
    """One entry for each full collection."""
    seen: list[None] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(None)

    gc.callbacks.append(collected)
    yield seen
    gc.callbacks.remove(collected)


async def for_a_while(waiting: int, at_latest_s: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(collect_while_few_wait(lambda: waiting, 0.01, at_latest_s), 0.2)


def test_collections_leave_out_what_was_there_before_the_server() -> None:
    before = {"module": object()}
    try:
        spare_what_was_imported()
        since = [{}]
        assert gc.get_freeze_count() > 0
        assert any(each is since for each in gc.get_objects())
        assert not any(each is before for each in gc.get_objects())
    finally:
        gc.unfreeze()


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
