"""The HTTP client under streamed requests, against sockets that do as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from router.base.clock import MonotonicClock
from router.upstream.codec.dialect import DIALECTS, OVERSPILL, Dialect
from router.upstream.codec.openai import encode_http
from router.upstream.http.connection import Exchange
from router.upstream.http.transport import (
    ConnectTrace,
    LeftError,
    NotConnectedError,
    PoolExhaustedError,
    PoolOptions,
    Response,
    StreamingClient,
    TransportError,
    UnsendableError,
)
from tests.router.upstream.servers.test_openai import ask
from tests.support.few_files import few_files
from tests.support.waiting import until

CLOCK = MonotonicClock()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
WHOLE = HEAD + b"content-length: 2\r\n\r\nok"


class Peer:
    """A server; notes each connection and request, and answers with `reply`."""

    def __init__(self, reply: Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]) -> None:
        self.reply = reply
        self.connections = 0
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()
        self.lost = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                self.requests.append(head)
                self.asked.set()
                await self.reply(writer)
        self.lost.set()
        writer.close()

    @contextlib.asynccontextmanager
    async def client(self, **options) -> AsyncIterator[StreamingClient]:
        pool = {"tls": False, "connect_timeout_s": 10.0, "max_connections": 8, "keepalive_expiry_s": 5.0, **options}
        listening = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        client = StreamingClient(url, {"authorization": "Bearer key"}, CLOCK, PoolOptions(**pool))
        try:
            yield client
        finally:
            await client.close()
            listening.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


async def whole(writer: asyncio.StreamWriter) -> None:
    writer.write(WHOLE)


async def nothing(_: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def begun(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")


async def post(client: StreamingClient, trace: ConnectTrace | None = None) -> Response:
    return await client.send("POST", "/v1/x", b"{}", [("x-one", "1")], trace or ConnectTrace(CLOCK))


async def read_all(response: Response) -> bytes:
    body = b""
    while data := await response.read():
        body += data
    return body


async def test_a_connection_is_used_again_and_its_cost_is_told_once() -> None:
    peer = Peer(whole)
    async with peer.client() as client:
        costs = []
        for _ in range(3):
            trace = ConnectTrace(CLOCK)
            response = await post(client, trace)
            assert await read_all(response) == b"ok"
            assert response.complete
            response.close()
            costs.append(trace.connect_s)
    assert peer.connections == 1
    assert costs[0] > 0
    assert costs[1:] == [0.0, 0.0]
    head = peer.requests[0].lower()
    assert b"authorization: bearer key" in head
    assert b"x-one: 1" in head
    assert b"accept-encoding: identity" in head
    assert b"user-agent: overspill/" in head, "some servers turn away who has no name"


@pytest.mark.parametrize("dialect", [OVERSPILL, DIALECTS["vllm"]], ids=lambda dialect: dialect.name)
async def test_each_field_of_a_request_stands_there_once(dialect: Dialect) -> None:
    peer = Peer(whole)
    request = ask()
    sent = encode_http(request, request.objective, "m", 2048, dialect)
    async with peer.client() as client:
        await read_all(await client.send(sent.method, sent.path, sent.body, sent.headers, ConnectTrace(CLOCK)))
    names = [line.partition(":")[0].lower() for line in peer.requests[0].decode().splitlines()[1:] if line]
    assert len(names) == len(set(names)), names
    assert "accept: text/event-stream" in peer.requests[0].decode()


async def test_a_client_knows_whether_the_next_request_finds_an_open_connection() -> None:
    goes_on = asyncio.Event()

    async def in_two_pieces(writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE[:-1])
        await goes_on.wait()
        writer.write(WHOLE[-1:])

    peer = Peer(in_two_pieces)
    async with peer.client(keepalive_expiry_s=0.5) as client:
        assert not client.warm
        response = await post(client)
        assert not client.warm, "it is in use"
        goes_on.set()
        await read_all(response)
        response.close()
        assert client.warm
        goes_on.clear()
        again = await post(client)
        assert not client.warm
        goes_on.set()
        await read_all(again)
        again.close()
        await asyncio.sleep(0.6)
        assert not client.warm, "it has expired"


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def until_the_end(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\nhello")
        await asyncio.sleep(0.05)
        writer.write(b" world")
        writer.close()

    peer = Peer(until_the_end)
    async with peer.client() as client:
        assert await read_all(await post(client)) == b"hello world"
        assert await read_all(await post(client)) == b"hello world"
    assert peer.connections == 2


async def test_what_comes_before_the_head_is_passed_over() -> None:
    async def hinting(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + WHOLE)

    peer = Peer(hinting)
    async with peer.client() as client:
        for _ in range(2):
            response = await post(client)
            assert response.status == 200
            assert "link" not in response.headers
            assert await read_all(response) == b"ok"
    assert peer.connections == 1


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", b"junk"])
async def test_a_server_that_says_more_than_it_was_asked_answers_nobody_else(more: bytes) -> None:
    """What it adds to one response must never be read as the response to another request."""

    async def talkative(writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE + more)

    peer = Peer(talkative)
    async with peer.client() as client:
        for _ in range(3):
            assert await read_all(await post(client)) == b"ok"
    assert peer.connections == 3


async def test_a_head_without_end_is_refused() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for n in range(10_000):
            writer.write(b"x-%d: %s\r\n" % (n, b"y" * 1000))
            await writer.drain()

    async with Peer(endless).client() as client:
        with pytest.raises(TransportError, match="larger than"):
            await post(client)


@pytest.mark.parametrize(
    ("before", "again"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nx: ", b"y" * 65536, id="value"),
        pytest.param(b"HTTP/1.1 200 OK\r\n", b"y" * 65536, id="name"),
        pytest.param(b"HTTP/1.1 200 ", b"y" * 65536, id="reason"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000, id="provisional"),
        pytest.param(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx: ", b"y" * 65536, id="trailer"),
        pytest.param(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n2;x", b"y" * 65536, id="extension"),
    ],
)
async def test_a_line_without_end_is_not_kept(before: bytes, again: bytes) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(before)
        while sent < 64 * 1024 * 1024:
            writer.write(again)
            sent += len(again)
            await writer.drain()

    peer = Peer(endless)
    async with peer.client() as client:
        with pytest.raises(TransportError, match="larger than"):
            await read_all(await post(client))
        await peer.lost.wait()
    assert sent < 32 * 1024 * 1024, "what the sockets hold, and not all that there is"


async def test_a_process_that_can_open_no_more_files_says_so_and_blames_nobody() -> None:
    peer = Peer(whole)
    async with peer.client() as client:
        await read_all(await post(client))
        with few_files(0):
            assert await read_all(await post(client)) == b"ok", "over the connection that is open"
            held = await client._pool.take(ConnectTrace(CLOCK))
            with pytest.raises(PoolExhaustedError, match="this process can open no more connections"):
                await post(client)
        held.abort()
        assert await read_all(await post(client)) == b"ok"


async def test_the_last_files_are_left_to_others() -> None:
    async with Peer(whole).client() as client:
        with few_files(4):
            with pytest.raises(PoolExhaustedError, match="this process can open no more connections"):
                await post(client)
            os.close(os.open(os.devnull, os.O_RDONLY))
        assert await read_all(await post(client)) == b"ok"


async def test_a_server_is_told_to_wait_while_nobody_reads() -> None:
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD + b"\r\n")
        for _ in range(400):
            writer.write(b"x" * 65_536)
            await writer.drain()
            sent += 65_536
        writer.close()

    async with Peer(flood).client() as client:
        response = await post(client)
        await asyncio.sleep(0.5)
        assert sent < 20_000_000, "kernels hold some megabytes, this process no more than it reads ahead"
        assert len(await read_all(response)) == 400 * 65_536


async def test_what_one_read_brings_is_heard_at_once_and_the_end_is_news() -> None:
    """Whoever listens is called once for each read, while the wait goes on; the last read ends it."""
    goes_on, ends = asyncio.Event(), asyncio.Event()

    async def paced(writer: asyncio.StreamWriter) -> None:
        await begun(writer)
        await goes_on.wait()
        writer.write(b"1\r\n,\r\n5\r\nworld\r\n")
        await ends.wait()
        writer.write(b"1\r\n!\r\n0\r\n\r\n")

    async with Peer(paced).client() as client:
        response = await post(client)
        assert await response.read() == b"hello"
        heard: list[bytes] = []
        news = response.news(lambda: heard.append(response.take()) or True)
        goes_on.set()
        await until(lambda: heard)
        assert not news.done()
        ends.set()
        await news
        assert heard == [b",world"]
        assert await read_all(response) == b"!"
        assert response.complete
        response.close()


async def test_the_beginning_of_what_came_may_be_taken_alone() -> None:
    pieces = [letter * 300 for letter in (b"a", b"b", b"c")]

    async def at_once(writer: asyncio.StreamWriter) -> None:
        chunked = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n")

    async with Peer(at_once).client() as client:
        response = await post(client)
        await until(lambda: response.left_bytes == 900)
        assert response.take(512) == b"".join(pieces[:2])
        assert response.left_bytes == 300
        assert not response.complete
        assert response.take(512) == pieces[2]
        assert response.take(512) == b""
        assert response.complete
        response.close()


@pytest.mark.parametrize("crashes", [True, False], ids=["it crashes", "it takes nothing"])
async def test_whoever_listens_may_leave_it_to_the_reader(*, crashes: bool) -> None:
    goes_on = asyncio.Event()

    async def paced(writer: asyncio.StreamWriter) -> None:
        await begun(writer)
        await goes_on.wait()
        writer.write(b"1\r\n!\r\n")
        await asyncio.sleep(60)

    async with Peer(paced).client() as client:
        response = await post(client)
        assert await response.read() == b"hello"
        news = response.news(lambda: bool(1 // 0) if crashes else False)
        goes_on.set()
        await news
        assert await response.read() == b"!"
        if crashes:
            with pytest.raises(ZeroDivisionError):
                await response.read()
        response.close()


async def test_a_waiting_request_gets_the_connection_that_comes_free_first() -> None:
    peer = Peer(whole)
    async with peer.client(max_connections=1, connect_timeout_s=5.0) as client:
        answers = await asyncio.gather(*(post(client) for _ in range(8)))
        assert [await read_all(answer) for answer in answers] == [b"ok"] * 8
    assert peer.connections == 1


@pytest.mark.parametrize("value", ["a\r\nx-evil: 1", "a\nb", "a\0b", "\ud800"])
async def test_a_header_that_would_be_another_one_is_not_sent(value: str) -> None:
    peer = Peer(whole)
    async with peer.client() as client:
        with pytest.raises(UnsendableError):
            await client.send("POST", "/v1/x", b"{}", [("x-one", value)], ConnectTrace(CLOCK))
    assert peer.requests == []


@pytest.mark.process
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate of this test")
async def test_a_tls_server_is_verified_and_answers(tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, made, check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    peer = Peer(whole)
    listening = await asyncio.start_server(peer.serve, "127.0.0.1", 0, ssl=server)
    port = listening.sockets[0].getsockname()[1]
    trusting = ssl.create_default_context(cafile=str(certificate))
    for context, works in ((trusting, True), (ssl.create_default_context(), False)):
        options = PoolOptions(tls=context, connect_timeout_s=5.0, max_connections=2, keepalive_expiry_s=5.0)
        client = StreamingClient(f"https://localhost:{port}", {}, CLOCK, options)
        if works:
            for _ in range(2):
                assert await read_all(await post(client)) == b"ok"
        else:
            with pytest.raises(NotConnectedError, match="certificate verify failed"):
                await post(client)
        await client.close()
    assert peer.connections == 1
    listening.close()


async def test_requests_of_one_turn_never_share_a_connection() -> None:
    """Crack 28: the pool handed one idle connection to every request of a turn, and all but one had to try again."""
    peer = Peer(whole)
    async with peer.client(max_connections=4) as client:

        async def one() -> bytes:
            response = await post(client)
            try:
                return await read_all(response)
            finally:
                response.close()

        for _ in range(5):
            assert await asyncio.gather(*(one() for _ in range(4))) == [b"ok"] * 4
    assert peer.connections <= 4
    assert len(peer.requests) == 20


async def test_an_idle_connection_expires() -> None:
    peer = Peer(whole)
    async with peer.client(keepalive_expiry_s=0.05) as client:
        for _ in range(2):
            await read_all(await post(client))
            await asyncio.sleep(0.2)
    assert peer.connections == 2


async def test_connections_of_a_network_that_this_machine_left_end_and_others_go_on() -> None:
    peer = Peer(begun)
    async with peer.client() as client:
        left, stays = await post(client), await post(client)
        assert await left.read() == await stays.read() == b"hello"
        next(iter(client._pool._open)).local = ("192.0.2.1", 4711)  # RFC 5737: no machine has it
        assert client.drop_gone()
        assert not client.drop_gone()
        ends = await asyncio.gather(
            *(asyncio.wait_for(each.read(), 0.3) for each in (left, stays)), return_exceptions=True
        )
        assert {type(end) for end in ends} == {asyncio.TimeoutError, LeftError}
        for each in (left, stays):
            each.close()


async def test_each_address_is_asked_about_once_however_many_connections_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("router.upstream.http.pool.is_here", lambda local: asked.append(local) or True)
    peer = Peer(begun)
    async with peer.client() as client:
        running = [await post(client) for _ in range(5)]
        assert not client.drop_gone()
        assert len(asked) == 1
        for each in running:
            each.close()


async def test_a_request_without_an_answer_hears_that_its_network_was_left() -> None:
    peer = Peer(nothing)
    async with peer.client() as client:
        asked = asyncio.create_task(post(client))
        await peer.asked.wait()
        next(iter(client._pool._open)).local = ("192.0.2.1", 4711)
        client.drop_gone()
        with pytest.raises(LeftError, match="left the network"):
            await asked
    assert len(peer.requests) == 1, "who decides where requests go sends it again"


async def test_idle_connections_are_dropped_and_those_in_use_are_not() -> None:
    peer = Peer(whole)
    async with peer.client() as client:
        held = await post(client)
        await read_all(await post(client))
        assert client.warm
        client.drop_idle()
        assert not client.warm
        assert await read_all(held) == b"ok"
        await read_all(await post(client))
    assert peer.connections <= 3


async def test_a_full_pool_is_told_from_an_absent_upstream() -> None:
    peer = Peer(begun)
    async with peer.client(max_connections=1, connect_timeout_s=1.0) as client:
        held = await post(client)
        with pytest.raises(PoolExhaustedError):
            await post(client)
        held.close()
    nowhere = PoolOptions(tls=False, connect_timeout_s=1.0, max_connections=1, keepalive_expiry_s=1.0)
    absent = StreamingClient("http://127.0.0.1:1", {}, CLOCK, nowhere)
    with pytest.raises(TransportError) as raised:
        await post(absent)
    await absent.close()
    assert not isinstance(raised.value, PoolExhaustedError)


async def test_closing_early_and_cancelling_close_the_connection() -> None:
    peer = Peer(begun)
    async with peer.client() as client:
        response = await post(client)
        assert await response.read() == b"hello"
        response.close()
        await asyncio.wait_for(peer.lost.wait(), 30)
    peer = Peer(nothing)
    async with peer.client() as client:
        task = asyncio.ensure_future(post(client))
        await asyncio.wait_for(peer.asked.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        peer.reply = whole
        assert await read_all(await post(client)) == b"ok"
        assert peer.connections == 2, "the one that was left is not used again"


@pytest.mark.parametrize("ends", ["whole", "closed", "cancelled"])
async def test_a_response_is_freed_as_it_ends_and_waits_for_no_garbage_collection(ends: str) -> None:
    async def use() -> None:
        response = await post(client)
        await (response.read() if ends == "closed" else read_all(response))
        response.close()

    peer = Peer({"whole": whole, "closed": begun, "cancelled": nothing}[ends])
    async with peer.client() as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(use(), 0.1 if ends == "cancelled" else 30)
            await until(lambda: not any(type(one) is Exchange for one in gc.get_objects()), 10.0)
        finally:
            gc.enable()


async def test_a_head_that_arrives_in_the_turn_of_its_cancellation_keeps_no_connection() -> None:
    for turns in range(30):
        peer = Peer(begun)
        async with peer.client(max_connections=1, connect_timeout_s=2.0) as client:
            task = asyncio.ensure_future(post(client))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await task).close()
            again = await post(client)  # the only place of the pool is free
            again.close()


async def test_a_pool_never_has_more_connections_than_places_whatever_is_cancelled() -> None:
    async def cancelled_after(turns: int) -> None:
        async with Peer(begun).client(max_connections=1, connect_timeout_s=2.0) as client:
            task = asyncio.ensure_future(post(client))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await task).close()
            await asyncio.sleep(0.01)  # what was left has been lost by now
            held = await post(client)
            with pytest.raises(PoolExhaustedError):
                await post(client)
            held.close()

    await asyncio.gather(*(cancelled_after(turns) for turns in range(30)))


async def test_who_waits_for_data_can_be_told_that_none_will_come() -> None:
    async with Peer(begun).client() as client:
        response = await post(client)
        await response.read()
        reader = asyncio.ensure_future(response.read())
        await asyncio.sleep(0)
        response.end(TransportError("lost"))
        with pytest.raises(TransportError, match="lost"):
            await reader
        with pytest.raises(TransportError, match="lost"):
            await response.read()
        response.close()


async def test_a_cut_connection_is_a_transport_error() -> None:
    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        writer.transport.abort()

    async with Peer(cut).client() as client:
        response = await post(client)
        with pytest.raises(TransportError):
            await read_all(response)
        response.close()

    async def garbage(writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n\r\n")

    async with Peer(garbage).client() as client:
        with pytest.raises(TransportError):
            await post(client)


def served_once(end: Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]) -> Peer:
    """A server that answers the first request of each connection, and ends the second one by `end`."""
    answered: set[asyncio.StreamWriter] = set()

    async def reply(writer: asyncio.StreamWriter) -> None:
        if writer in answered:
            await end(writer)
            raise ConnectionError
        answered.add(writer)
        await whole(writer)

    return Peer(reply)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize("end", [close, reset])
async def test_a_kept_connection_that_the_server_closes_costs_no_request(end) -> None:
    """llama.cpp closes connections that it kept: a request that meets one goes over a new connection."""
    peer = served_once(end)
    async with peer.client() as client:
        for connections in (1, 2, 3):
            response = await post(client)
            assert await read_all(response) == b"ok"
            response.close()
            assert peer.connections == connections
            assert client.warm == (connections != 2), "the connection of a second try is not kept"
    assert len(peer.requests) == 4


async def test_a_request_that_breaks_on_a_new_connection_is_not_sent_again() -> None:
    peer = Peer(close)
    async with peer.client() as client:
        with pytest.raises(TransportError):
            await post(client)
    assert len(peer.requests) == 1


async def test_a_second_try_is_the_last_one() -> None:
    broken = False

    async def reply(writer: asyncio.StreamWriter) -> None:
        await (close if broken else whole)(writer)

    peer = Peer(reply)
    async with peer.client() as client:
        await read_all(await post(client))
        broken = True
        with pytest.raises(TransportError):
            await post(client)
    assert len(peer.requests) == 3


async def test_a_request_of_which_the_server_has_made_something_is_not_sent_again() -> None:
    async def half_a_head(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-")
        writer.close()

    async def after_a_while(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.close()

    for end in (half_a_head, after_a_while):
        peer = served_once(end)
        async with peer.client(connect_timeout_s=0.1) as client:
            await read_all(await post(client))
            with pytest.raises(TransportError):
                await post(client)
        assert len(peer.requests) == 2


async def test_redirects_and_the_environments_proxies_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")

    async def elsewhere(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 307 x\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n")

    async with Peer(elsewhere).client() as client:
        response = await post(client)
        assert response.status == 307
        response.close()
