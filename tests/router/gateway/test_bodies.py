"""What request bodies may take of a tier's memory, on raw sockets against a real uvicorn."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from router.base.errors import BodyShed
from router.gateway.app import GatewayLimits
from router.gateway.auth import CALLER
from router.gateway.bodies import SMALL_BODY_BYTES, BodyRoom, BodyShare
from router.gateway.endpoint import context_of
from router.tenants.tenant import Caller
from tests.support.gateway_fakes import FAMILY, FakeDispatcher, Server, gateway_deps, serving

CHAT = "/v1/chat/completions"
LARGE = 700_000


def body(text: str = "say a b", **fields) -> dict:
    return {"model": FAMILY, "messages": [{"role": "user", "content": text}], **fields}


@contextlib.contextmanager
def upload(server: Server, announced: int, sent: int, path: str = CHAT, key: str = "") -> Iterator[socket.socket]:
    """A caller that has sent a part of its body and does not go on."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as caller:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {announced}\r\n"
        caller.sendall(f"{head}authorization: Bearer {key}\r\n\r\n".encode() if key else f"{head}\r\n".encode())
        caller.sendall(b" " * sent)
        yield caller


@contextlib.contextmanager
def streaming(server: Server, text: str) -> Iterator[httpx.Response]:
    """An answer that has begun and goes on."""
    with httpx.stream("POST", server.url + CHAT, json=body(text, stream=True)) as held:
        pieces = held.iter_bytes()  # dropping it would close the connection
        next(pieces)
        yield held
        next(pieces)


def read_reply(caller: socket.socket) -> tuple[int, bytes]:
    """The reply's status, and all of it, while its request is still incomplete."""
    raw = b""
    while b"\r\n\r\n" not in raw or not raw.endswith(b"}"):
        piece = caller.recv(65536)
        assert piece, raw
        raw += piece
    return int(raw.split()[1]), raw


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", f"/v2/models/{FAMILY}/infer", "/v1/embeddings"])
def test_a_full_gateway_refuses_before_it_reads_a_body(path: str) -> None:
    limits = GatewayLimits(max_requests=1, retry_after_s=2.5)
    with serving(gateway_deps(limits=limits)) as server, streaming(server, "forever") as held:
        with upload(server, 16 << 20, 1 << 20, path) as caller:
            status, raw = read_reply(caller)
        assert (status, b"retry-after: 3\r\n" in raw, b"retry-after-ms: 2500\r\n" in raw) == (429, True, True)
        assert httpx.get(server.url + "/health/ready").status_code == 200
        assert httpx.get(server.url + "/v1/models").status_code == 200
        assert [request.request_id for request in server.dispatcher.requests] == [held.headers["x-request-id"]]


def test_a_place_is_given_back_whatever_becomes_of_its_body() -> None:
    limits = GatewayLimits(max_requests=1, body_timeout_s=0.1, max_body_bytes=100_000)
    with serving(gateway_deps(limits=limits)) as server, httpx.Client(base_url=server.url) as client:
        with upload(server, 9, 1) as slow:
            assert read_reply(slow)[0] == 408
        assert client.post(CHAT, content=b"x" * 100_001).status_code == 413
        assert client.post(CHAT, content=b"{").status_code == 400
        with upload(server, 9, 1):
            pass
        while client.post(CHAT, json=body()).status_code == 429:  # until the server has seen that it left
            pass
        assert client.post(CHAT, json=body()).status_code == 200


def test_one_of_several_callers_leaves_places_to_the_others() -> None:
    limits = GatewayLimits(max_requests=10)
    deps = gateway_deps(limits=limits, api_keys={"busy": 0, "other": 0})
    with serving(deps) as server, httpx.Client(base_url=server.url) as client, contextlib.ExitStack() as held:

        def ask(key: str) -> httpx.Response:
            return client.post(CHAT, json=body(), headers={"authorization": f"Bearer {key}"})

        for _ in range(9):
            held.enter_context(upload(server, 9, 1, key="busy"))
        refused = ask("busy")
        while refused.status_code == 200:  # until the server has seen all of them
            refused = ask("busy")
        assert refused.status_code == 429
        assert "9 requests of yours are in flight here" in refused.json()["error"]["message"]
        assert ask("other").status_code == 200
        held.close()
        while ask("busy").status_code == 429:  # until the server has seen that they left
            pass


def test_who_is_alone_has_every_place() -> None:
    deps = gateway_deps(limits=GatewayLimits(max_requests=10), api_keys={"busy": 0})
    with serving(deps) as server, httpx.Client(base_url=server.url) as client, contextlib.ExitStack() as held:

        def refusal() -> str:
            reply = client.post(CHAT, json=body(), headers={"authorization": "Bearer busy"})
            return "" if reply.status_code == 200 else reply.json()["error"]["message"]

        for _ in range(10):
            held.enter_context(upload(server, 9, 1, key="busy"))
        while not (refused := refusal()):  # until the server has seen all of them
            pass
        assert refused.startswith("10 requests are in flight here")


def test_bodies_share_a_room_and_small_ones_always_fit() -> None:
    limits = GatewayLimits(max_body_bytes=1_000_000, max_bodies_bytes=1_000_000, retry_after_s=4)
    with serving(gateway_deps(limits=limits)) as server, httpx.Client(base_url=server.url) as client:
        large = json.dumps(body("say " + "x" * LARGE)).encode()
        with upload(server, LARGE + 9, LARGE):
            refused = client.post(CHAT, content=large)
            while refused.status_code == 200:  # until the server has received the other one
                refused = client.post(CHAT, content=large)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "4")
            assert refused.json()["error"]["code"] == "body_shed"
            assert "large request bodies" in refused.json()["error"]["message"]
            packed = client.post(CHAT, content=gzip.compress(large), headers={"content-encoding": "gzip"})
            assert packed.status_code == 429
            assert client.post(CHAT, json=body()).status_code == 200
        while client.post(CHAT, content=large).status_code == 429:  # until the server has seen that it left
            pass
        assert client.post(CHAT, content=large).status_code == 200


def test_a_stream_holds_no_room_for_what_it_was_asked_with() -> None:
    limits = GatewayLimits(max_body_bytes=1_000_000, max_bodies_bytes=1_000_000)
    dispatcher = FakeDispatcher()
    with serving(gateway_deps(dispatcher, limits=limits)) as server, streaming(server, "forever " + "x" * LARGE):
        assert httpx.post(server.url + CHAT, json=body("say " + "x" * LARGE)).status_code == 200


def test_room_is_given_back_once_and_never_less_than_one_body() -> None:
    room = BodyRoom(GatewayLimits(max_body_bytes=1_000_000, max_bodies_bytes=1))
    share = BodyShare(room)
    for size in (10, SMALL_BODY_BYTES + 5, SMALL_BODY_BYTES + 3, 1_000_000):
        share.grow(size)
    assert room.held_bytes == 1_000_000 - SMALL_BODY_BYTES
    share.release()
    share.release()
    assert room.held_bytes == 0


def test_one_caller_leaves_room_for_a_body_of_another() -> None:
    """Bodies may come slowly, a minute each: whoever sends several at once would keep everybody else's out."""
    limits = GatewayLimits(max_body_bytes=1_000_000, max_bodies_bytes=3_000_000)
    room = BodyRoom(limits)
    mallory = [BodyShare(room, "mallory") for _ in range(3)]
    for share in mallory[:2]:
        share.grow(1_000_000)
    with pytest.raises(BodyShed, match="large request bodies of yours take 1868928 bytes here, and may take 2000000"):
        mallory[2].grow(1_000_000)
    guest = BodyShare(room, "guest")
    guest.grow(1_000_000)
    for share in (*mallory, guest):
        share.release()
    assert not room.by_owner
    alone = [BodyShare(room) for _ in range(3)]  # where nobody tells callers apart, one may take all of it
    for share in alone:
        share.grow(1_000_000)


def test_a_body_counts_for_the_tenant_that_sends_it() -> None:
    room = BodyRoom(GatewayLimits())
    scope = {"method": "POST", "path": CHAT, "headers": [], CALLER: Caller(digest="mallory")}
    context = context_of(scope, room)
    context.share.grow(SMALL_BODY_BYTES + 10)
    assert room.by_owner == {"mallory": 10}
    context.close()
    assert not room.by_owner
