"""The event loop of a tier: names of servers beside names that nobody answers for."""

import asyncio
import errno
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from router.base import loop as tier_loop
from router.base.loop import Address, TierLoop

ANSWER: Address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", 8000))
OTHER: Address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.8", 8000))


class Resolver:
    """The system's: names that begin with `dead` wait until `gate` opens, others are answered at once."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: Counter[str] = Counter()
        self.answer: Callable[[str], list[Address]] = lambda _: [ANSWER]

    def __call__(self, host: str, *_: object) -> list[Address]:
        self.asked[host] += 1
        if host.startswith("dead"):
            self.gate.wait(60)
        return self.answer(host)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Any:
    resolver = Resolver()
    monkeypatch.setattr(tier_loop, "_LIMIT_S", 60.0)
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    yield resolver
    resolver.gate.set()


def on_tier_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(work(), loop_factory=TierLoop)


async def looked_up(host: str) -> list[Address]:
    return await asyncio.get_running_loop().getaddrinfo(host, 8000, type=socket.SOCK_STREAM)


async def given_up(host: str) -> None:
    """Ask, and give up while the resolver still tries."""
    asking = asyncio.ensure_future(looked_up(host))
    await asyncio.sleep(0.02)
    asking.cancel()
    await asyncio.wait([asking])


def test_names_that_nobody_answers_for_keep_no_other_one_waiting(resolver: Resolver) -> None:
    async def work() -> None:
        dead = [asyncio.ensure_future(looked_up(f"dead-{n}.example")) for n in range(8)]
        assert await looked_up("localhost") == [ANSWER]
        assert not any(asking.done() for asking in dead)
        resolver.gate.set()
        assert await asyncio.gather(*dead) == [[ANSWER]] * 8

    on_tier_loop(work)


def test_a_look_up_that_was_given_up_is_waited_for_by_who_asks_next(resolver: Resolver) -> None:
    async def work() -> None:
        for _ in range(5):
            await given_up("dead.example")
        asking = asyncio.ensure_future(looked_up("dead.example"))
        await asyncio.sleep(0)
        resolver.gate.set()
        assert await asking == [ANSWER]
        assert resolver.asked["dead.example"] == 1  # one thread, however often it was asked

    on_tier_loop(work)


def test_a_name_that_nobody_answers_for_is_told_before_a_connection_gives_up(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_loop, "_LIMIT_S", 0.02)

    async def work() -> None:
        for _ in range(3):
            with pytest.raises(socket.gaierror, match=r"no DNS server has answered for its name within 0\.02 s"):
                await looked_up("dead.example")
        assert resolver.asked["dead.example"] == 1

    on_tier_loop(work)


def test_what_was_found_after_everybody_gave_up_is_there_for_the_next(resolver: Resolver) -> None:
    async def work() -> None:
        await given_up("dead.example")
        resolver.gate.set()
        await asyncio.sleep(0.05)
        assert await looked_up("dead.example") == [ANSWER]
        assert resolver.asked["dead.example"] == 1

    on_tier_loop(work)


def test_last_addresses_hold_while_no_dns_server_answers(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_loop, "_KEPT_S", 0.0)
    monkeypatch.setattr(tier_loop, "_PATIENCE_S", 0.01)

    def fails(number: int) -> Callable[[str], list[Address]]:
        def answer(_: str) -> list[Address]:
            raise socket.gaierror(number, "no")

        return answer

    def no_more_files(_: str) -> list[Address]:
        raise OSError(errno.EMFILE, "no")

    async def work() -> None:
        resolver.gate.set()
        assert await looked_up("dead.example") == [ANSWER]
        resolver.gate.clear()  # no reply at all
        assert await looked_up("dead.example") == [ANSWER]
        resolver.answer = fails(socket.EAI_AGAIN)  # the resolver has given up
        resolver.gate.set()
        assert await looked_up("dead.example") == [ANSWER]
        resolver.answer = fails(socket.EAI_FAIL)  # a server refuses to say
        await asyncio.sleep(0.05)
        assert await looked_up("dead.example") == [ANSWER]
        resolver.answer = no_more_files
        await asyncio.sleep(0.05)
        assert await looked_up("dead.example") == [ANSWER]
        resolver.answer = lambda _: [OTHER]  # it is back
        await asyncio.sleep(0.05)
        assert await looked_up("dead.example") == [OTHER]
        resolver.answer = fails(socket.EAI_NONAME)  # a server says that there is none any more
        await asyncio.sleep(0.05)
        with pytest.raises(socket.gaierror):
            await looked_up("dead.example")
        resolver.answer = fails(socket.EAI_AGAIN)
        with pytest.raises(socket.gaierror):
            await looked_up("dead.example")

    on_tier_loop(work)


def test_a_name_that_is_none_and_a_process_without_threads_are_told(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def answer(_: str) -> list[Address]:
        raise UnicodeError("label too long")  # as of `gpu..local`, too

    async def work() -> None:
        resolver.answer = answer
        with pytest.raises(socket.gaierror, match="it can be no name"):
            await looked_up("x" * 64)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(BlockingIOError):
                await looked_up("one.example")
        resolver.answer = lambda _: [ANSWER]
        assert await looked_up("one.example") == [ANSWER]

    on_tier_loop(work)


def test_what_cannot_even_be_asked_for_is_told_and_asked_for_anew(resolver: Resolver) -> None:
    def answer(_: str) -> list[Address]:
        raise OverflowError("Python int too large to convert to C long")

    async def work() -> None:
        resolver.answer = answer
        for _ in range(2):
            with pytest.raises(OverflowError):
                await asyncio.wait_for(looked_up("one.example"), 5)
        resolver.answer = lambda _: [ANSWER]
        assert await looked_up("one.example") == [ANSWER]

    on_tier_loop(work)
