"""A crowd at the door: few requests begin in one turn of the event loop, and who asks for health waits for none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import httpx
import pytest

from router.gateway.app import create_app
from router.gateway.connection import ConnectionLimits
from router.gateway.listener import Listener, bind
from router.gateway.turns import BEGUN_A_TURN, Turns
from tests.support.gateway_fakes import FAMILY, FakeDispatcher, gateway_deps
from tests.support.waiting import until

CROWD = 200
BODY = json.dumps({"model": FAMILY, "messages": [{"role": "user", "content": "forever"}], "stream": True}).encode()
CHAT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY) + BODY
)


async def test_few_begin_in_a_turn_and_the_first_to_come_first() -> None:
    turns, begun = Turns(), []

    async def begins(number: int) -> None:
        await turns.mine()
        begun.append(number)

    tasks = [asyncio.create_task(begins(number)) for number in range(50)]
    before = 0
    while len(begun) < 50:
        await asyncio.sleep(0)
        assert len(begun) - before <= BEGUN_A_TURN
        before = len(begun)
    assert begun == list(range(50))
    await asyncio.gather(*tasks)


async def test_who_is_alone_begins_at_once_and_who_waited_is_told_for_how_long() -> None:
    turns = Turns()
    assert await turns.mine() == 0.0
    waited_s = await asyncio.gather(*(turns.mine() for _ in range(3 * BEGUN_A_TURN)))
    assert waited_s[0] == 0.0
    assert waited_s[-1] > 0.0


async def test_one_that_is_ended_while_it_waits_holds_nobody_up() -> None:
    turns = Turns()
    tasks = [asyncio.create_task(turns.mine()) for _ in range(40)]
    await asyncio.sleep(0)
    for task in tasks[BEGUN_A_TURN:-1]:
        task.cancel()
    await asyncio.wait(tasks, timeout=30)
    assert tasks[-1].result() > 0.0


async def test_a_probe_behind_a_crowd_is_answered_before_most_of_it_has_begun() -> None:
    """Every head of the crowd is there before the probe's."""
    dispatcher, begun_before = FakeDispatcher(), []

    def notices() -> tuple[str, ...]:
        begun_before.append(len(dispatcher.requests))
        return ()

    app = create_app(gateway_deps(dispatcher, notices=notices))
    with bind("127.0.0.1", 0, "gateway") as bound, contextlib.ExitStack() as held:
        bound.listen(2 * CROWD)
        for _ in range(CROWD):
            one = held.enter_context(socket.create_connection(bound.getsockname()))
            one.sendall(CHAT)
        probe = held.enter_context(socket.create_connection(bound.getsockname()))
        probe.sendall(b"GET /health/ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        probe.setblocking(False)
        async with Listener(app, ConnectionLimits()).running(bound):
            reply = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(probe, 4096), 60)
            assert reply.startswith(b"HTTP/1.1 200")
            assert begun_before[0] < 0.75 * CROWD
            await until(lambda: len(dispatcher.requests) == CROWD)  # and nobody is forgotten
            held.close()
            await until(lambda: len(dispatcher.closed) == CROWD)


async def test_a_wait_for_its_turn_is_part_of_what_a_request_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(_: Turns) -> float:
        return 1000.0

    monkeypatch.setattr(Turns, "mine", late)
    dispatcher = FakeDispatcher()
    deps = gateway_deps(dispatcher)
    before_s = deps.clock.now_s()
    with bind("127.0.0.1", 0, "gateway") as bound:
        async with Listener(create_app(deps), ConnectionLimits()).running(bound), httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1/chat/completions"
            chat = {"model": FAMILY, "messages": [{"role": "user", "content": "say hi"}]}
            assert (await client.post(url, json=chat, timeout=60)).status_code == 200
    assert -1000.0 <= dispatcher.requests[0].accepted_at_s - before_s < -900.0
