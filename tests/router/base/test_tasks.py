"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.base.timers import end, within


async def stubborn() -> str:
    """What `asyncio.wait_for` of Python 3.10 makes of a task: it survives its first cancellation."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(60)
    return "never"


async def test_a_task_that_swallows_a_cancellation_ends_too() -> None:
    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled()
    await end(task)


async def test_within_returns_raises_and_ends_what_it_leaves() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)

    async def wrong() -> None:
        raise ZeroDivisionError

    assert await within(1, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ZeroDivisionError):
        await within(1, wrong())
    with pytest.raises(asyncio.TimeoutError):
        await within(0.01, work())
    assert ended == [1]
    news = asyncio.get_running_loop().create_future()
    news.set_result("gone")
    with pytest.raises(asyncio.TimeoutError):
        await within(60, asyncio.sleep(60), news)


async def test_cancelling_within_is_never_swallowed() -> None:
    """Also not when the result arrives in the same turn."""
    result = asyncio.get_running_loop().create_future()

    async def work() -> object:
        return await result

    outer = asyncio.create_task(within(60, work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    result.set_result("late")
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer


async def test_what_came_while_the_process_stood_still_came_in_time() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    address = server.sockets[0].getsockname()

    async def connect() -> asyncio.StreamWriter:
        asyncio.get_running_loop().call_later(0.01, time.sleep, 0.2)  # as a machine does that gives it no processor
        await asyncio.sleep(0.02)
        return (await asyncio.open_connection(*address))[1]

    writer = await within(0.1, connect())
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()
