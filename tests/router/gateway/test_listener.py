"""A listener that cannot start, or that dies, is heard of: a tier that answers nothing must not look alive."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import httpx
import pytest
import uvloop

from router.gateway.connection import ConnectionLimits
from router.gateway.listener import Listener, bind


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0, "gateway") as taken:
        yield taken


async def app(scope, receive, send) -> None:
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def fails(*_: object, **__: object) -> None:
    raise RuntimeError("no selector left")


async def dies(listener: Listener, serving: asyncio.Task[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "on_tick", fails)
    await asyncio.wait({serving}, timeout=30)
    assert serving.done()


async def test_it_serves_inside_the_block_and_lets_go_after_it(bound: socket.socket) -> None:
    address = bound.getsockname()
    async with Listener(app, ConnectionLimits()).running(bound) as serving, httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{address[1]}/")).status_code == 204
        assert not serving.done()
    assert serving.done()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


async def test_one_that_cannot_start_never_enters_the_block(
    bound: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(app, ConnectionLimits())
    monkeypatch.setattr(listener, "startup", fails)
    with pytest.raises(RuntimeError, match="no selector left"):
        async with listener.running(bound):
            pytest.fail("the block was entered")


async def test_one_that_dies_wakes_its_owner_and_says_why(
    bound: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(app, ConnectionLimits())
    with pytest.raises(RuntimeError, match="no selector left"):
        async with listener.running(bound) as serving:
            await dies(listener, serving, monkeypatch)


async def test_the_owners_own_error_comes_first(bound: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener(app, ConnectionLimits())

    async def own() -> None:
        async with listener.running(bound) as serving:
            await dies(listener, serving, monkeypatch)
            raise ValueError("a model is missing")

    with pytest.raises(ValueError, match="a model is missing"):
        await own()


@pytest.mark.parametrize("more", [b"", b"x"])
async def test_a_body_that_nobody_reads_does_not_hold_its_connection_open(bound: socket.socket, more: bytes) -> None:
    """`app` answers without reading: what is left of the body is dropped, and not waited for in all eternity."""
    limits = ConnectionLimits(header_timeout_s=0.2, keep_alive_s=0.2)
    async with Listener(app, limits).running(bound):
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
        writer.write(more)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_a_body_that_is_dropped_whole_leaves_its_connection_usable(bound: socket.socket) -> None:
    async with Listener(app, ConnectionLimits(keep_alive_s=60)).running(bound):
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n" + b"x" * 100)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
        writer.close()


def test_many_who_connect_at_once_are_accepted_in_a_few_turns(bound: socket.socket) -> None:
    """One a turn: beside long turns, whoever asked for health waited behind all of them."""
    address, crowd = bound.getsockname(), [socket.socket() for _ in range(64)]

    async def accepted() -> int:
        listener = Listener(app, ConnectionLimits())
        async with listener.running(bound):
            for one in crowd:
                one.connect(address)  # the kernel takes it, whatever the loop does
            for _ in range(16):
                await asyncio.sleep(0)
            return len(listener._settings.table)

    loop = uvloop.new_event_loop()
    try:
        assert loop.run_until_complete(accepted()) == len(crowd)
    finally:
        loop.close()
        for one in crowd:
            one.close()
