"""No crowd of idle or slow strangers keeps anybody out, and what is odd in a head costs nobody a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from router.base.shortage import is_among_last
from router.gateway.accept import _accept_some
from router.gateway.app import create_app
from router.gateway.connection import KEPT_FILES, ConnectionLimits, GuardedProtocol
from router.gateway.connection_table import ConnectionTable, address_of
from router.gateway.lingering import LingeringTransport
from router.gateway.listener import Listener, allow_open_files, bind
from tests.support.few_files import few_files
from tests.support.gateway_fakes import FAMILY, FakeDispatcher, gateway_deps
from tests.support.waiting import until

KEY = {"authorization": "Bearer k"}
CHAT = {"model": FAMILY, "messages": [{"role": "user", "content": "say hi"}]}


@contextlib.asynccontextmanager
async def gateway(limits: ConnectionLimits, **changes) -> AsyncIterator[int]:
    with bind("127.0.0.1", 0, "gateway") as bound:
        async with Listener(create_app(gateway_deps(**changes)), limits).running(bound):
            yield bound.getsockname()[1]


async def idle(port: int, count: int, held: contextlib.ExitStack, sent: bytes = b"") -> list[socket.socket]:
    """Connections that send no request."""
    loop, found = asyncio.get_running_loop(), []
    for _ in range(count):
        one = held.enter_context(socket.socket())
        one.setblocking(False)
        await loop.sock_connect(one, ("127.0.0.1", port))
        if sent:
            await loop.sock_sendall(one, sent)
        found.append(one)
    return found


async def raw(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n"], ids=["idle", "slow head"])
async def test_thousands_of_idle_connections_shut_nobody_out(sent: bytes) -> None:
    limits = ConnectionLimits(max_connections=4096)
    allow_open_files(limits)
    crowd = min(4500, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2 - 600)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    async with gateway(limits, api_keys={"k": 0}) as port, httpx.AsyncClient() as kept:
        url = f"http://127.0.0.1:{port}/v1/models"
        assert (await kept.get(url, headers=KEY)).status_code == 200
        with contextlib.ExitStack() as held:
            await idle(port, crowd, held, sent)
            began = time.perf_counter()
            assert (await kept.get(url, headers=KEY)).status_code == 200  # on the connection that it had
            for _ in range(5):
                async with httpx.AsyncClient() as fresh:
                    assert (await fresh.get(url, headers=KEY)).status_code == 200
            assert time.perf_counter() - began < 10, "not until somebody's timeout"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer k\r\ncontent-length: 9\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
    ids=["idle", "slow head", "answered", "slow body", "refused"],
)
async def test_a_connection_that_was_closed_leaves_nothing_for_a_garbage_collection(sent: bytes) -> None:
    """Who opens connections by the thousand would fill the memory between two, and the next one would stand still."""

    def left() -> int:
        ours = (GuardedProtocol, LingeringTransport)
        return sum(issubclass(type(one), ours) for one in gc.get_objects())  # and ask no other object what it is

    limits = ConnectionLimits()
    async with gateway(limits, api_keys={"k": 0}) as port:
        gc.collect()
        before = left()
        gc.disable()
        try:
            with contextlib.ExitStack() as held:
                await idle(port, 20, held, sent)
                await until(lambda: left() >= before + 20 or b"nonsense" in sent)
                await asyncio.sleep(0.05)  # what was sent is read
            await until(lambda: left() == before, 10)
        finally:
            gc.enable()


async def test_who_leaves_in_the_first_of_several_pipelined_answers_is_no_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher = FakeDispatcher()
    async with gateway(ConnectionLimits(), dispatcher=dispatcher) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(chat("hang") * 3)
        await until(lambda: dispatcher.requests)
        writer.close()
        await until(lambda: dispatcher.cancelled_starts)
        await asyncio.sleep(0)
    assert len(dispatcher.requests) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_connections_and_lost_log_lines_are_told() -> None:
    deps = gateway_deps()
    with bind("127.0.0.1", 0, "gateway") as bound:
        limits = ConnectionLimits(max_connections=4)
        async with Listener(create_app(deps), limits, deps.telemetry.registry).running(bound):
            port = bound.getsockname()[1]
            with contextlib.ExitStack() as held:
                await idle(port, 4, held)
                async with httpx.AsyncClient() as client:
                    metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    assert "overspill_gateway_connections 2.0" in metrics
    assert "overspill_gateway_connections_closed_total 3.0" in metrics
    assert 'overspill_log_lines_lost_total{why="unformatted"}' in metrics


async def test_a_newcomer_closes_the_oldest_stranger_and_no_proven_connection() -> None:
    async with gateway(ConnectionLimits(max_connections=8)) as port:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as held:
            proven = (await idle(port, 1, held))[0]
            await loop.sock_sendall(proven, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await loop.sock_recv(proven, 65536)).startswith(b"HTTP/1.1 200")
            strangers = await idle(port, 6, held)
            for number in range(2):
                assert await asyncio.wait_for(loop.sock_recv(strangers[number], 10), 10) == b""
            await loop.sock_sendall(proven, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await loop.sock_recv(proven, 65536)).startswith(b"HTTP/1.1 200")


async def test_of_a_crowd_that_comes_at_once_everybody_hears_something() -> None:
    """All are accepted before the request of any is read: who has to make room again has asked, and is told why."""
    ask = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    async with gateway(ConnectionLimits(max_connections=8)) as port:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as held:
            crowd = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)]
            for one in crowd:  # the event loop has not turned since the first of them came
                one.sendall(ask)
                one.setblocking(False)
            heard = [await asyncio.wait_for(loop.sock_recv(one, 65536), 30) for one in crowd]
        told = [reply.split(b" ", 2)[1] for reply in heard]
        assert set(told) == {b"200", b"503"}
        assert told.count(b"200") >= 4, "the unproven may hold half of the table"
        assert all(b"retry-after: 1\r\n" in reply for reply in heard if b" 503 " in reply)


async def test_where_all_are_busy_one_too_many_is_told_when_to_come_back() -> None:
    async with gateway(ConnectionLimits(max_connections=2)) as port:
        body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "hang"}]}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        with contextlib.ExitStack() as held:
            for _ in range(2):
                await idle(port, 1, held, head + body)
                await asyncio.sleep(0.1)
            refused = await raw(port, b"")
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in refused


class Peer:
    """A connection as the table sees it."""

    def __init__(self, address: str) -> None:
        self.client: tuple[str, int] | None = (address, 1)
        self.left = False

    def make_room(self) -> None:
        self.left = True


def test_the_address_with_most_strangers_gives_way_first() -> None:
    table = ConnectionTable(8)
    honest = Peer("10.0.0.1")
    assert table.opened(honest)
    crowd = [Peer("10.0.0.2") for _ in range(50)]
    assert all(table.opened(peer) for peer in crowd)
    assert not honest.left
    assert [peer.left for peer in crowd] == [True] * 47 + [False] * 3
    assert len(table) == 4


def test_a_network_of_version_6_counts_as_one_address() -> None:
    assert address_of(("2001:db8::1", 1)) == address_of(("2001:db8::ffff:1", 2)) != address_of(("2001:db8:1::1", 1))
    assert address_of(("::ffff:10.0.0.1", 1)) == address_of(("10.0.0.1", 9)) == "10.0.0.1"
    assert address_of(None) == address_of(("", 0)) == ""
    assert address_of(("fe80::1%eth0", 1)).startswith("fe80::")


@given(st.lists(st.tuples(st.sampled_from("oplbr"), st.integers(0, 11)), max_size=80), st.integers(1, 8))
def test_the_table_never_holds_more_than_it_may_and_forgets_nobody(steps: list[tuple[str, int]], most: int) -> None:
    table = ConnectionTable(most)
    peers = [Peer(f"10.0.0.{number % 3}") for number in range(12)]
    inside: set[int] = set()
    for step, number in steps:
        peer = peers[number]
        if step == "o" and number not in inside:
            peer.left = False
            if table.opened(peer):
                inside.add(number)
        elif step == "l":
            table.lost(peer)
            inside.discard(number)
        elif step != "o":
            {"p": table.proved, "b": table.busy, "r": table.rests}[step](peer)
        inside -= {n for n in inside if peers[n].left}
        assert len(table) == len(inside) <= most
    for number in inside:
        table.lost(peers[number])
    assert len(table) == 0


_CROWD = """
import socket, sys
crowd = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(400)]
print("there", flush=True)
sys.stdin.read()
"""


async def test_one_turn_takes_no_more_than_the_first_of_the_last_files() -> None:
    """Those that make room are closed behind it: a burst would take what is kept for others meanwhile."""
    taken: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        bound = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
        bound.setblocking(False)
        for _ in range(80):
            opened.enter_context(socket.create_connection(bound.getsockname()))
        with few_files(100):
            _accept_some(bound, lambda accepted, _: taken.append(accepted), asyncio.get_running_loop().create_future())
            assert [is_among_last(one, KEPT_FILES) for one in taken].count(True) == 1
        for one in taken:
            opened.enter_context(one)


@pytest.mark.process
def test_a_crowd_leaves_files_to_whoever_comes_whatever_else_the_process_has_open() -> None:
    """The table may have room for thousands: what other connections and files take is not in it."""

    async def asked() -> list[int]:
        found = []
        async with (
            gateway(ConnectionLimits()) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        ):
            command = [sys.executable, "-c", _CROWD, str(port)]
            crowd = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert crowd.stdout is not None
            try:
                with few_files(200):
                    assert await crowd.stdout.readline() == b"there\n"
                    for _ in range(3):
                        reply = await client.get(
                            f"http://127.0.0.1:{port}/health/live", headers={"connection": "close"}
                        )
                        found.append(reply.status_code)
            finally:
                crowd.kill()
                await crowd.communicate()
        return found

    loop = uvloop.new_event_loop()  # a tier's
    try:
        assert loop.run_until_complete(asked()) == [200, 200, 200]
    finally:
        loop.close()


async def test_a_limit_on_open_files_bounds_the_connections() -> None:
    """A connection that cannot even be accepted can make nobody give way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        async with gateway(ConnectionLimits(max_connections=100_000)) as port:
            listener = Listener(create_app(gateway_deps()), ConnectionLimits(max_connections=100_000))
            assert listener._settings.limits.max_connections < 400
            assert port
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ── heads ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("head", [b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nhost: localhost\r\nx: "])
async def test_a_slow_head_is_answered_with_408_before_its_connection_closes(head: bytes) -> None:
    async with gateway(ConnectionLimits(header_timeout_s=0.2)) as port:
        assert (await raw(port, head)).startswith(b"HTTP/1.1 408 ")
        assert await raw(port, b"") == b"", "who says nothing hears nothing"
        whole = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
        replies = await raw(port, whole + head)
        assert replies.count(b"HTTP/1.1 ") == 2
        assert b"HTTP/1.1 408 " in replies


@pytest.mark.parametrize("pieces", [1, 2, 40], ids=["one piece", "head and body", "byte by byte"])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0, h2c"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_request_that_asks_for_another_protocol_is_answered_over_this_one(
    pieces: int, protocol: bytes, chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps(CHAT).encode()
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    payload = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        b"upgrade: %s\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n%s\r\n\r\n" % (protocol, framing)
    )
    second = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    cut = len(head) + len(payload)
    data = head + payload + second
    async with gateway(ConnectionLimits()) as port:
        with caplog.at_level(logging.WARNING):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in {
                1: [data],
                2: [head, payload, second],
                40: [*(data[n : n + 1] for n in range(cut)), second],
            }[pieces]:
                writer.write(piece)
                await asyncio.sleep(0)
            replies = await asyncio.wait_for(reader.read(), 20)
            writer.close()
    assert replies.count(b"HTTP/1.1 200 ") == 2
    assert b"hi" in replies
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("head", [b"CONNECT /v1/models", b"CONNECT localhost:443", b"CONNECT *"])
async def test_connect_is_answered_and_recurses_nowhere(head: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Crack 29: it asked for another protocol again and again, a thousand frames deep, and hung up with a traceback."""
    request = head + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    async with gateway(ConnectionLimits()) as port:
        with caplog.at_level(logging.WARNING):
            reply = await raw(port, request)
    assert reply.split(b" ")[1] in {b"400", b"404", b"405"}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_thousands_of_pipelined_upgrades_are_answered_one_after_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Crack 29: each was a recursion of the parser below the one before."""
    count = 1500
    upgrade = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    async with gateway(ConnectionLimits()) as port:
        with caplog.at_level(logging.WARNING):
            replies = await raw(port, upgrade * count + last)
    assert replies.count(b"HTTP/1.1 200 ") == count + 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def chat(prompt: str, **fields: object) -> bytes:
    body = json.dumps({"model": FAMILY, "messages": [{"role": "user", "content": prompt}], **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


_BROKEN = {
    "no HTTP": (b"this is no request\r\n\r\n", 400),
    "no chunk": (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        400,
    ),
    "head": (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431),
}


@pytest.mark.parametrize("broken", _BROKEN)
@pytest.mark.parametrize("together", [True, False])
async def test_what_cannot_be_read_waits_for_the_answers_before_it(broken: str, *, together: bool) -> None:
    sent, status = _BROKEN[broken]
    async with gateway(ConnectionLimits()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        first = chat("slow a b c", stream=True) + chat("say d e")
        writer.write(first + sent if together else first)
        if not together:
            begun = await reader.readuntil(b"data:")
            writer.write(sent)
        else:
            begun = b""
        replies = begun + await asyncio.wait_for(reader.read(), 20)
        writer.close()
    streamed, whole, refused = replies.split(b"HTTP/1.1 ")[1:]
    assert streamed.startswith(b"200 ")
    assert streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert whole.startswith(b"200 ")
    assert b"d e" in whole
    assert refused.startswith(b"%d " % status)


async def test_a_body_that_breaks_off_under_its_own_answer_ends_it() -> None:
    async with gateway(ConnectionLimits()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_BROKEN["no chunk"][0].removesuffix(b"zz\r\n"))
        await asyncio.sleep(0.1)
        writer.write(b"zz\r\n")
        replies = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert replies.count(b"HTTP/1.1 ") == 1
    assert replies.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("whole", [True, False])
async def test_an_answer_over_http_1_0_that_breaks_off_is_not_taken_for_a_whole_one(*, whole: bool) -> None:
    """Without chunks the end of the connection is that of the answer; proxies speak so to what is behind them."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"audio/wav")]})
        await send({"type": "http.response.body", "body": b"RIFF", "more_body": True})
        await asyncio.sleep(0.1)
        if whole:
            await send({"type": "http.response.body", "body": b"."})

    with bind("127.0.0.1", 0, "gateway") as bound:
        async with Listener(app, ConnectionLimits()).running(bound):
            reader, writer = await asyncio.open_connection("127.0.0.1", bound.getsockname()[1])
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            try:
                await reader.readuntil(b"RIFF")
                if whole:
                    assert await reader.read() == b"."
                else:
                    with pytest.raises(ConnectionResetError):
                        await reader.read()
            finally:
                writer.close()


async def test_who_leaves_after_a_long_body_is_noticed() -> None:
    """Reading stops while much of a body waits to be taken; it goes on, or nobody hears that the client has left."""
    dispatcher = FakeDispatcher()
    head, _, body = chat("hang", user="x" * 100_000).partition(b"\r\n\r\n")
    async with gateway(ConnectionLimits(), dispatcher=dispatcher) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"\r\n\r\n")  # as clients do that write head and body one after the other
        await asyncio.sleep(0.1)
        writer.write(body)
        await until(lambda: dispatcher.requests)
        writer.close()
        await until(lambda: dispatcher.cancelled_starts)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://evil.example/v1/models", b"localhost", 421),
        (b"http://evil.example", b"localhost", 421),
        (b"http://localhost:8600/v1/models?a=1", b"evil.example", 200),
        (b"/v1/models", b"localhost", 200),
        (b"//evil.example/v1/models", b"localhost", 404),
    ],
)
async def test_the_host_of_an_absolute_target_is_the_one_that_counts(target: bytes, host: bytes, status: int) -> None:
    async with gateway(ConnectionLimits()) as port:
        request = b"GET %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n" % (target, host)
        assert (await raw(port, request)).startswith(b"HTTP/1.1 %d " % status)


async def test_a_request_without_any_host_is_not_answered_without_keys() -> None:
    async with gateway(ConnectionLimits()) as port:
        for version in (b"1.0", b"1.1"):
            reply = await raw(port, b"GET /v1/models HTTP/%s\r\nconnection: close\r\n\r\n" % version)
            assert reply.startswith(b"HTTP/1.1 421 ")
        assert (await raw(port, b"GET /health/live HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_a_field_after_the_body_adds_nothing_to_the_head() -> None:
    dispatcher = FakeDispatcher()
    body = json.dumps(CHAT).encode()
    async with gateway(ConnectionLimits(), dispatcher=dispatcher, api_keys={"k": 0}) as port:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        sent = head + b"%x\r\n%s\r\n0\r\nauthorization: Bearer k\r\n\r\n" % (len(body), body)
        assert (await raw(port, sent)).startswith(b"HTTP/1.1 401 ")
    assert not dispatcher.requests


ODD = [
    b"CONNECT evil.example:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    b"GET /%ff%00 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    b"GET /v1/decisions/%00%ff%0d%0a HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nX-Overspill-Locality : local-only\r\nconnection: close\r\n\r\n",
    *(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"%s: %s\r\ncontent-length: 2\r\n\r\n{}" % (name, value)
        for name in (b"x-request-id", b"traceparent", b"x-overspill-session", b"authorization", b"content-type")
        for value in (b"\xff\xfe\x80", b"a\tb", b"\xc3\xa4", b"a" * 9000, b"", b"a\x7fb")
    ),
]


@pytest.mark.parametrize("request_", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("keys", [{}, {"k": 0}], ids=["no keys", "keys"])
async def test_odd_bytes_are_a_callers_fault_and_no_crash(
    request_: bytes, keys: dict, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(ConnectionLimits(header_timeout_s=1.0), api_keys=keys) as port:
        reply = await raw(port, request_)
    assert reply.startswith(b"HTTP/1.1 4"), reply[:200]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "stream"])
async def test_who_reads_nothing_holds_no_connection_and_no_memory_for_ever(
    monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    """A connection that is closed goes on to hold what was written to it, until its peer has read that."""
    monkeypatch.setattr("router.gateway.lingering._UNREAD_S", 0.2)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        piece = bytes(32 * 1024 * 1024)
        await send({"type": "http.response.body", "body": piece, "more_body": not whole})

    with bind("127.0.0.1", 0, "gateway") as bound, socket.socket() as peer:
        listener = Listener(app, ConnectionLimits(keep_alive_s=0.1))
        async with listener.running(bound):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(peer, bound.getsockname())
            await loop.sock_sendall(peer, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await until(lambda: len(listener.server_state.connections))
            await until(lambda: not len(listener.server_state.connections))


class Unsent:
    """A transport whose peer reads so: what is left to be sent, look by look."""

    def __init__(self, *left_bytes: int) -> None:
        self._left_bytes = list(left_bytes)
        self.aborted = False

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self._left_bytes.pop(0)

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(
    ("left_bytes", "cut"), [((9, 8, 3, 1, 0), False), ((0,), False), ((9, 8, 8), True), ((9, 9), True)]
)
async def test_who_reads_slowly_gets_all_of_it(
    monkeypatch: pytest.MonkeyPatch, left_bytes: tuple[int, ...], *, cut: bool
) -> None:
    monkeypatch.setattr("router.gateway.lingering._UNREAD_S", 0.0)
    peer = Unsent(*left_bytes)
    LingeringTransport(peer, lambda: False).close()  # type: ignore[arg-type]
    await until(lambda: not peer._left_bytes)
    assert peer.aborted is cut
