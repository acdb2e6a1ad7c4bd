"""Blocks that others can end: what is interrupted says so, and a cancellation stays one."""

from __future__ import annotations

import asyncio
import sys

import pytest

from router.base.timers import Interrupted, Interruptible


async def test_an_interrupted_block_raises_interrupted_and_its_task_goes_on() -> None:
    block = Interruptible()
    asyncio.get_running_loop().call_soon(block.interrupt)
    with pytest.raises(Interrupted), block:
        await asyncio.sleep(60)
    block.interrupt()  # too late: nothing
    await asyncio.sleep(0)
    with Interruptible() as untouched:
        await asyncio.sleep(0)
    assert not untouched.interrupted


async def test_a_block_that_swallows_its_interruption_is_interrupted_again() -> None:
    block = Interruptible()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    asyncio.get_running_loop().call_soon(block.interrupt)
    with pytest.raises(Interrupted), block:
        await stubborn()


async def test_a_cancelled_block_stays_cancelled() -> None:
    async def work() -> None:
        with Interruptible():
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before, a task does not count its cancellations")
async def test_a_cancellation_in_the_same_turn_as_an_interruption_is_not_swallowed() -> None:
    block = Interruptible()

    async def work() -> None:
        with block:
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    block.interrupt()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
