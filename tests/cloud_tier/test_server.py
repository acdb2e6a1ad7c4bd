"""The tier over real sockets, with an engine that has no model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import httpx
import msgspec
import pytest

from cloud_tier.config import CloudConfig, LimitsConfig, ModelConfig, ServerConfig
from cloud_tier.lineup import line_up
from cloud_tier.plan import Plan, make_plan
from cloud_tier.server import CloudTier, Phase
from models.catalogue.families import load_catalogue
from models.store.store import ModelStore
from router.base.errors import ConfigError
from router.decisions.reader import DecisionReader
from router.decisions.settings import DecisionFileSettings
from router.gateway import lingering
from router.gateway.listener import bind
from router.tenants.tenancy import KeySources
from router.values.settings import RouterSettings
from tests.support.fake_engine import FakeEngine, broken_config, toy_model_directory
from tests.support.ports import taken_port
from tests.support.waiting import until

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Where?"}], "temperature": 0}
KEY = "k" * 24


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return toy_model_directory(tmp_path / "toy")


def _plan(
    toy: Path, *, engines: int = 1, keys: Mapping[str, int] | None = None, limits: LimitsConfig | None = None, **server
) -> Plan:
    names = ("toy-best", "toy-small")
    entries = tuple(
        ModelConfig(
            path=str(toy),
            name=names[rung],
            family="toy",
            rung=rung,
            quality=1.0 - rung / 10,
            device="cpu",
            dtype="float32",
        )
        for rung in range(engines)
    )
    config = CloudConfig(
        server=ServerConfig(port=0, warm_up=False, **server),
        models=entries,
        router=RouterSettings(max_wait_ms=3000.0),
        limits=limits or LimitsConfig(),
    )
    catalogue = load_catalogue()
    return Plan(
        config, line_up(entries, catalogue, ModelStore(toy, catalogue)), catalogue, KeySources.of(keys or {}), ""
    )


class Running:
    """A tier, the task that runs it, its engines and a client to it."""

    def __init__(self, plan: Plan, make_engine: Callable) -> None:
        self.engines: list[FakeEngine] = []

        def make(config, clock) -> FakeEngine:
            self.engines.append(make_engine(config, clock))
            return self.engines[-1]

        self.bound = bind(plan.config.server.host, plan.config.server.port, "server")
        self.port: int = self.bound.getsockname()[1]
        self.tier = CloudTier(plan, make)
        self.task = asyncio.create_task(self.tier.run(self.bound))
        headers = {"authorization": f"Bearer {KEY}"} if plan.keys.fixed else {}
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=10)

    async def until(self, phase: Phase) -> None:
        await until(lambda: self.tier.phase is phase or self.task.done())

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, 15)


@contextlib.asynccontextmanager
async def running(plan: Plan, make_engine: Callable = FakeEngine) -> AsyncIterator[Running]:
    run = Running(plan, make_engine)
    try:
        await run.until(Phase.SERVING)
        yield run
        run.tier.stop()
        run.tier.stop()
        await run.ended()
    finally:
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)
        await run.client.aclose()
        run.bound.close()


class Events:
    """A streamed chat, read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.text = ""
        self.finish: str | None = None
        self.error: dict | None = None
        self.done = False

    async def next(self) -> bool:
        async for line in self._lines:
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                self.done = True
                return False
            event = json.loads(line[6:])
            self.error = event.get("error", self.error)
            for choice in event.get("choices", ()):
                self.text += choice["delta"].get("content") or ""
                self.finish = choice["finish_reason"] or self.finish
            return True
        return False

    async def rest(self) -> Events:
        while await self.next():
            pass
        return self

    async def until_text(self) -> None:
        while not self.text:
            assert await self.next()


def _stream(client: httpx.AsyncClient, **more):
    return client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True, **more})


async def test_answers_and_says_who(toy: Path) -> None:
    async with running(_plan(toy)) as run:
        reply = await run.client.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 200
        assert reply.json()["choices"][0]["message"]["content"] == FakeEngine.says
        assert reply.headers["x-overspill-tier"] == "cloud"
        assert reply.headers["x-overspill-model"] == "toy-best"
        assert "server" not in reply.headers
        metrics = (await run.client.get("/metrics")).text
    assert 'overspill_engine_restarts_total{engine="engine/toy-best"} 0.0' in metrics
    there = 'model_name="toy-best",replica="engine/toy-best"'
    assert f"overspill_num_requests_running{{{there}}} 0.0" in metrics
    assert f"overspill_kv_cache_usage_perc{{{there}}} 0.0" in metrics
    assert "process_resident_memory_bytes" in metrics
    assert 'outcome="completed"' in metrics


async def test_decisions_are_kept_on_disk(toy: Path, tmp_path: Path) -> None:
    plan = _plan(toy)
    settings = DecisionFileSettings(path=str(tmp_path / "decisions.jsonl"))
    plan = dataclasses.replace(plan, config=msgspec.structs.replace(plan.config, decisions=settings))
    async with running(plan) as run:
        reply = await run.client.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 200
    (line,) = DecisionReader(tmp_path / "decisions.jsonl")
    assert (line.outcome, line.finish_reason, line.chosen.tier) == ("completed", "stop", "cloud")


async def test_health_answers_while_engines_load(toy: Path) -> None:
    gate = asyncio.Event()

    class Slow(FakeEngine):
        async def start(self) -> None:
            await gate.wait()
            await super().start()

    run = Running(_plan(toy), Slow)
    try:
        while True:
            with contextlib.suppress(httpx.ConnectError):
                live = await run.client.get("/health/live")
                break
        assert live.status_code == 200
        for reply in (
            await run.client.get("/health/ready"),
            await run.client.post("/v1/chat/completions", json=CHAT),
        ):
            assert reply.status_code == 503
            assert "starting" in reply.json()["error"]["message"]
            assert float(reply.headers["retry-after-ms"]) > 0
        gate.set()
        await run.until(Phase.SERVING)
        assert (await run.client.get("/health/ready")).status_code == 200
    finally:
        run.tier.stop()
        await run.ended()
        await run.client.aclose()
        run.bound.close()


async def test_an_engine_that_cannot_start_ends_the_tier_and_the_other_engines(toy: Path) -> None:
    made: list[FakeEngine] = []

    def make(config, clock) -> FakeEngine:
        made.append(broken_config() if made else FakeEngine(config))
        return made[-1]

    run = Running(_plan(toy, engines=2), make)
    with pytest.raises(ConfigError, match="3 KV heads"):
        await run.ended()
    assert [engine.state.value for engine in made] == ["stopped", "stopped"]
    await run.client.aclose()
    run.bound.close()


async def test_stop_while_engines_load_ends_at_once(toy: Path) -> None:
    class Endless(FakeEngine):
        async def start(self) -> None:
            await asyncio.Event().wait()

    run = Running(_plan(toy), Endless)
    await asyncio.sleep(0.05)
    run.tier.stop()
    await run.ended()
    await run.client.aclose()
    run.bound.close()


async def test_draining_finishes_streams_refuses_the_rest_and_then_lets_go(toy: Path) -> None:
    async with running(_plan(toy)) as run:
        engine = run.engines[0]
        async with _stream(run.client) as response:
            events = Events(response)
            await events.until_text()
            engine.may_go_on.clear()
            run.tier.stop()
            await run.until(Phase.DRAINING)
            ready = await run.client.get("/health/ready")
            refused = await run.client.post("/v1/chat/completions", json=CHAT)
            for reply in (ready, refused):
                assert reply.status_code == 503
                assert "draining" in reply.json()["error"]["message"]
                assert int(reply.headers["retry-after"]) >= 1
            assert (await run.client.get("/health/live")).status_code == 200
            engine.may_go_on.set()
            await events.rest()
        assert (events.text, events.finish, events.done) == (FakeEngine.says, "stop", True)
        await run.ended()
        assert engine.state.value == "stopped"
        with pytest.raises(httpx.ConnectError):
            await run.client.get("/health/live")


async def test_the_drain_has_a_limit_and_cut_streams_are_told(toy: Path) -> None:
    async with running(_plan(toy, drain_s=0.05)) as run:
        async with _stream(run.client) as response:
            events = Events(response)
            await events.until_text()
            run.engines[0].may_go_on.clear()
            run.tier.stop()
            await events.rest()
        assert events.finish is None
        assert events.error is not None
        assert isinstance(events.error["code"], str)
        await run.ended()


async def test_a_second_signal_does_not_wait(toy: Path) -> None:
    async with running(_plan(toy, drain_s=3600)) as run:
        async with _stream(run.client) as response:
            events = Events(response)
            await events.until_text()
            run.engines[0].may_go_on.clear()
            run.tier.stop()
            run.tier.stop()
            await events.rest()
        assert events.error is not None
        await run.ended()


async def test_an_engine_that_dies_in_mid_stream_is_continued_by_the_next_rung(toy: Path) -> None:
    async with running(_plan(toy, engines=2)) as run:
        best, small = run.engines
        async with _stream(run.client) as response:
            assert response.headers["x-overspill-model"] == "toy-best"
            events = Events(response)
            await events.until_text()
            best.may_go_on.clear()
            before = events.text
            best.die()
            await events.rest()
        assert events.text.startswith(before + FakeEngine.says[:5])
        assert (events.finish, events.done, events.error) == ("stop", True, None)
        assert small.tokenizer.decode(small.seen[0].prompt_ids).startswith("<user>Where?</user><assistant>T")
        assert (best.open, small.open) == (0, 0)
        reply = await run.client.post("/v1/chat/completions", json=CHAT)
        assert reply.headers["x-overspill-model"] == "toy-small"
        assert (await run.client.get("/health/ready")).status_code == 200


async def test_the_only_engine_dies_and_everyone_hears_of_it(toy: Path) -> None:
    async with running(_plan(toy)) as run:
        engine = run.engines[0]
        async with _stream(run.client) as response:
            events = Events(response)
            await events.until_text()
            engine.die()
            await events.rest()
        assert events.finish is None
        assert events.error is not None
        ready = await run.client.get("/health/ready")
        assert ready.status_code == 503
        assert "restarting" in ready.json()["error"]["message"]
        refused = await run.client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code in {502, 503}
        assert refused.json()["error"]["message"]
        assert refused.status_code != 503 or int(refused.headers["retry-after"]) >= 1
        assert (
            'overspill_engine_restarts_total{engine="engine/toy-best"} 1.0' in (await run.client.get("/metrics")).text
        )
        engine.revive()
        assert (await run.client.get("/health/ready")).status_code == 200
        assert (await run.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_caller_that_goes_away_frees_the_engine(toy: Path) -> None:
    async with running(_plan(toy)) as run:
        engine = run.engines[0]
        async with _stream(run.client) as response:
            await Events(response).until_text()
            engine.may_go_on.clear()
            assert engine.open == 1
        await until(lambda: engine.open == 0)


async def test_keys_are_asked_for_and_never_shown(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = _plan(toy, keys={KEY: 0})
    assert KEY not in repr(plan)
    async with running(plan) as run:
        for headers in ({"authorization": ""}, {"authorization": f"Bearer {KEY[:-1]}x"}, {"authorization": KEY}):
            reply = await run.client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert reply.status_code == 401
            error = reply.json()["error"]
            assert error["type"] == "authentication_error"
            assert error["code"] == "invalid_api_key"
            assert KEY not in reply.text
        assert (await run.client.get("/metrics", headers={"authorization": ""})).status_code == 401
        assert (await run.client.get("/health/ready", headers={"authorization": ""})).status_code == 200
        assert (await run.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert KEY not in caplog.text


def test_a_plan_beyond_loopback_needs_a_key(toy: Path) -> None:
    config = CloudConfig(server=ServerConfig(host="0.0.0.0"), models=(ModelConfig(path=str(toy), device="cpu"),))  # noqa: S104
    with pytest.raises(ConfigError, match="no API key is set"):
        make_plan(config, {})
    with pytest.raises(ConfigError, match=r"no model to serve: .*\[\[backends\]\]"):
        make_plan(CloudConfig(), {})
    assert make_plan(config, {"OVERSPILL_CLOUD_API_KEYS": KEY}).keys.directory().by_key(KEY.encode())


def test_a_taken_port_is_named_with_a_remedy() -> None:
    with taken_port() as port, pytest.raises(ConfigError, match=rf"127.0.0.1:{port} .*choose another --port"):
        bind("127.0.0.1", port, "server")
    with pytest.raises(ConfigError, match="another host"):
        bind("192.0.2.1", 0, "server")


# --- what a connection may cost ---------------------------------------------------------------------------------------


async def _raw(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send pieces, then read until the tier closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_head_that_never_ends_is_closed_however_it_drips(toy: Path) -> None:
    async with running(_plan(toy, limits=LimitsConfig(header_timeout_s=0.2))) as run:
        assert await _raw(run.port) == b""
        slow = await _raw(run.port, b"GET /health/live HTTP/1.1\r\n", *[b"a: b\r\n"] * 5, pause_s=0.02)
        assert slow.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in slow


async def test_a_head_of_any_size_is_refused_beyond_64_kib(toy: Path) -> None:
    async with running(_plan(toy)) as run:
        lines = [b"a: " + b"b" * 8000 + b"\r\n"] * 9
        large = await _raw(run.port, b"GET /health/live HTTP/1.1\r\n", *lines, pause_s=0.02)
        assert large.startswith(b"HTTP/1.1 431 ")


async def test_a_body_that_is_too_large_is_refused_so_that_the_caller_hears_it(toy: Path) -> None:
    async with running(_plan(toy, limits=LimitsConfig(max_body_bytes=1000))) as run:
        body = b"x" * 20_000_000  # far more than socket buffers hold: the caller still sends when it is refused
        reply = await run.client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"


async def test_whoever_sends_for_ever_after_a_refusal_is_cut_off(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "_LINGER_BYTES", 1_000_000)
    async with running(_plan(toy, limits=LimitsConfig(max_body_bytes=1000))) as run:
        _, writer = await asyncio.open_connection("127.0.0.1", run.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n")

        async def send_for_ever() -> None:
            while True:
                writer.write(b"x" * 100_000)
                await writer.drain()

        with pytest.raises(ConnectionError):
            await send_for_ever()
        writer.close()


async def test_what_is_no_http_is_answered_in_the_shape_of_every_error(toy: Path) -> None:
    async with running(_plan(toy)) as run:
        refused = await _raw(run.port, b"\x16\x03\x01 what?\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 400 ")
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"


@pytest.mark.slow
async def test_many_requests_in_one_piece_are_not_one_large_head(toy: Path) -> None:
    async with running(_plan(toy)) as run:
        request = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
        last = request.replace(b"host", b"connection: close\r\nhost")
        replies = await _raw(run.port, request * 3000 + last)
        assert replies.count(b"HTTP/1.1 200 ") == 3001


async def test_idle_connections_give_way_to_a_caller(toy: Path) -> None:
    limits = LimitsConfig(max_connections=4)
    async with running(_plan(toy, limits=limits)) as run, contextlib.AsyncExitStack() as held:
        idle = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
            held.callback(writer.close)
            idle.append(reader)
        assert await asyncio.wait_for(idle[0].read(), 10) == b""
        assert (await run.client.get("/v1/models")).status_code == 200


async def test_a_connection_is_kept_for_several_requests(toy: Path) -> None:
    async with running(_plan(toy, limits=LimitsConfig(header_timeout_s=0.3, keep_alive_s=5.0))) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        for _ in range(3):
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"}")
            await asyncio.sleep(0.2)
        writer.close()
        await writer.wait_closed()


async def test_the_service_manager_is_told(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        monkeypatch.setenv("NOTIFY_SOCKET", str(address))
        async with running(_plan(toy)):
            pass
        manager.setblocking(False)
        assert [manager.recv(64) for _ in range(2)] == [b"READY=1", b"STOPPING=1"]


async def test_an_engine_is_unloaded_and_loaded_again_while_the_other_serves(toy: Path) -> None:
    async with running(_plan(toy, engines=2)) as here:
        client = here.client
        small = {**CHAT, "model": "toy-small"}
        assert (await client.post("/v1/chat/completions", json=small)).status_code == 200
        gone = await client.post("/v2/repository/models/toy-small/unload")
        assert gone.status_code == 200, gone.text
        assert (await client.post("/v1/chat/completions", json=small)).status_code == 404
        assert (await client.post("/v1/chat/completions", json=CHAT)).headers["x-overspill-model"] == "toy-best"
        index = {e["name"]: e["state"] for e in (await client.post("/v2/repository/index")).json()}
        assert index == {"toy": "READY", "toy-best": "READY", "toy-small": "UNAVAILABLE"}
        assert "toy-small" not in {card["id"] for card in (await client.get("/v1/models")).json()["data"]}
        assert (await client.post("/v2/repository/models/toy-small/load")).status_code == 200
        assert (await client.post("/v1/chat/completions", json=small)).status_code == 200
        assert (await client.post("/v2/repository/models/nothing/load")).status_code == 404
