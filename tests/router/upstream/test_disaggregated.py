"""Prefill and decode on servers of their own: when a prompt is handed over, what is said, and what if that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from router.base.clock import MonotonicClock
from router.base.errors import InvalidRequest
from router.upstream.backend import Backend
from router.upstream.disaggregated import Disaggregated, DisaggregatedReplica, TransferCost, weigh
from router.upstream.servers.foreign import Surroundings
from router.upstream.servers.openai import OpenAIServer
from router.upstream.servers.polled import ServerOptions
from router.upstream.settings import BackendModel, BackendSettings
from router.upstream.source import SourceHooks
from router.values.prompt import ChatPrompt, Message
from router.values.replica import ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from tests.router.upstream.servers.test_tier import raw_server
from tests.support.router_fakes import info
from tests.support.waiting import until

HELD = {"do_remote_prefill": True, "remote_engine_id": "e1", "remote_block_ids": [[1, 2, 3]], "remote_port": 5600}


@dataclass
class FakeVllm:
    """What a vLLM server was asked, and what it answers a prompt with that is to be computed only."""

    held: Any = field(default_factory=lambda: dict(HELD))
    status: int = 200
    silent: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET /v1/models"):
            self.write(writer, {"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 1000}]})
        elif head.startswith(b"GET"):
            self.write(writer, {})
        else:
            length = int(head.lower().split(b"content-length:")[1].split()[0])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            if self.silent:
                await asyncio.sleep(600)
            if self.bodies[-1]["stream"]:
                events = [{"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}]
                events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
                stream = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + stream + b"data: [DONE]\n\n")
            else:
                self.write(writer, {"choices": [], "kv_transfer_params": self.held}, self.status)
        await writer.drain()

    def write(self, writer: asyncio.StreamWriter, tree: object, status: int = 200) -> None:
        data = json.dumps(tree).encode()
        writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)


@contextlib.asynccontextmanager
async def server(fake: FakeVllm, name: str, prefill_tokens_per_s: float) -> AsyncIterator[Backend]:
    async with raw_server(fake) as url:
        model = BackendModel(served="tiny", prefill_tokens_per_s=prefill_tokens_per_s, decode_tokens_per_s=50.0)
        settings = BackendSettings(name=name, urls=(url,), server="vllm", models=(model,), poll_interval_s=0.05)
        clock = MonotonicClock()
        surroundings = Surroundings(clock, SourceHooks(), lambda _: None)
        options = ServerOptions(poll_interval_s=0.05)
        make = partial(OpenAIServer, settings=settings, surroundings=surroundings, options=options)
        yield Backend(settings, make, clock, lambda: None)


@dataclass
class Pair:
    """A source of two fake servers: one that computes prompts fast, and one that is slow at it."""

    prefill: FakeVllm
    decode: FakeVllm
    source: Disaggregated

    @property
    def replica(self) -> DisaggregatedReplica:
        (replica,) = self.source.replicas
        assert isinstance(replica, DisaggregatedReplica)
        return replica


@contextlib.asynccontextmanager
async def pair(
    connector: Any = "nixl", *, decode_prefill_tokens_per_s: float = 10.0, **changes: Any
) -> AsyncIterator[Pair]:
    prefill, decode = FakeVllm(**changes), FakeVllm()
    async with (
        server(prefill, "prefill", 100_000.0) as one,
        server(decode, "decode", decode_prefill_tokens_per_s) as two,
        Disaggregated(one, two, connector, MonotonicClock()) as source,
    ):
        await until(lambda: one.replicas and one.replicas[0].snapshot().available)
        await until(lambda: source.replicas and source.replicas[0].snapshot().available)
        yield Pair(prefill, decode, source)


def ask(prompt_tokens: int = 100) -> InferenceRequest:
    return InferenceRequest(
        request_id="r",
        model="tiny",
        prompt=ChatPrompt((Message("user", "hello"),)),
        sampling=SamplingParams(max_tokens=9, temperature=0.0),
        objective=Objective(),
        prompt_tokens=prompt_tokens,
        accepted_at_s=MonotonicClock().now_s(),
    )


async def text_of(replica: DisaggregatedReplica, request: InferenceRequest) -> str:
    return "".join([chunk.text async for chunk in replica.generate(request)])


async def test_the_prefill_server_computes_and_the_decode_server_is_told_where_that_is() -> None:
    async with pair() as both:
        assert await text_of(both.replica, ask()) == "hi"
        (computed,), (answered,) = both.prefill.bodies, both.decode.bodies
        assert (computed["stream"], computed["max_tokens"]) == (False, 1)
        assert "stream_options" not in computed
        assert computed["kv_transfer_params"]["do_remote_decode"] is True
        assert computed["kv_transfer_params"]["remote_block_ids"] is None
        assert (answered["stream"], answered["max_tokens"]) == (True, 9)
        assert answered["kv_transfer_params"] == HELD
        assert computed["messages"] == answered["messages"]
        assert (both.replica.handed_over, both.replica.fell_back) == (1, 0)


async def test_over_a_shared_folder_both_get_the_prompt_and_nothing_else() -> None:
    async with pair("shared-folder") as both:
        assert await text_of(both.replica, ask()) == "hi"
        assert "kv_transfer_params" not in both.prefill.bodies[0]
        assert "kv_transfer_params" not in both.decode.bodies[0]
        assert both.replica.handed_over == 1


async def test_without_a_gain_the_decode_server_computes_the_prompt() -> None:
    async with pair(decode_prefill_tokens_per_s=100_000.0) as both:
        assert await text_of(both.replica, ask()) == "hi"
        assert both.prefill.bodies == []
        assert "kv_transfer_params" not in both.decode.bodies[0]


@pytest.mark.parametrize("changes", [{"held": None}, {"held": "nowhere"}, {"status": 500}, {"status": 503}])
async def test_a_prefill_server_that_fails_is_done_without(changes: dict[str, Any]) -> None:
    async with pair(**changes) as both:
        assert await text_of(both.replica, ask()) == "hi"
        assert "kv_transfer_params" not in both.decode.bodies[0]
        assert (both.replica.handed_over, both.replica.fell_back) == (0, 1)


async def test_a_silent_prefill_server_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.upstream.disaggregated._PATIENCE_S", 0.05)
    async with pair(silent=True) as both:
        assert await text_of(both.replica, ask()) == "hi"
        assert both.replica.fell_back == 1
        await until(lambda: not both.source._pools[0].replicas[0].busy)  # type: ignore[attr-defined]


async def test_a_request_that_is_at_fault_is_refused_without_trying_again() -> None:
    async with pair(status=400) as both:
        with pytest.raises(InvalidRequest):
            await text_of(both.replica, ask())
        assert both.decode.bodies == []


async def test_a_prompt_that_does_not_fit_there_is_not_handed_over() -> None:
    async with pair() as both:
        assert both.replica.hand_over(ask(prompt_tokens=999)) is not None
        assert both.replica.hand_over(ask(prompt_tokens=1000)) is None


async def test_a_replica_stays_the_same_one_while_its_server_does() -> None:
    async with pair() as both:
        assert both.replica is both.replica
        assert both.replica.info.replica_id == "decode/tiny"
        assert both.source.unreached == ""


async def test_leaving_it_leaves_both() -> None:
    async with pair() as both:
        pools = both.source._pools
    for pool in pools:
        assert isinstance(pool, Backend)
        (server,) = pool._servers.values()
        assert server._watcher is not None
        assert server._watcher.done()


def snapshot(prefill_tokens_per_s: float, **changes: Any) -> ReplicaSnapshot:
    prior = SpeedPrior(prefill_tokens_per_s, 50.0)
    return ReplicaSnapshot(info(prior=prior), available=True, slots=8, **changes)


def test_an_idle_decode_server_of_the_same_speed_gains_nothing_from_a_detour() -> None:
    worth = weigh(ask(), snapshot(1000.0), snapshot(1000.0), transfer_s=0.02)
    assert worth.spared_s == 0
    assert worth.gain_s == pytest.approx(-0.02)


def test_every_answer_that_would_stand_still_counts() -> None:
    worth = weigh(ask(100), snapshot(1000.0), snapshot(1000.0, running=5), transfer_s=0.02)
    assert worth.gain_s == pytest.approx(5 * 0.1 - 0.02)


def test_prompts_that_wait_count_on_both_sides() -> None:
    behind = weigh(ask(100), snapshot(1000.0, queued_prefill_tokens=400), snapshot(1000.0, running=1), transfer_s=0.0)
    ahead = weigh(ask(100), snapshot(1000.0), snapshot(1000.0, queued_prefill_tokens=400, running=1), transfer_s=0.0)
    assert behind.gain_s == pytest.approx(0.1 - 0.4)
    assert ahead.gain_s == pytest.approx(0.1 + 0.4)


def test_the_transfer_is_learnt() -> None:
    cost = TransferCost()
    guessed_s = cost.predict_s(1000)
    for _ in range(50):
        cost.observe(1000, 10 * guessed_s)
    assert cost.predict_s(1000) == pytest.approx(10 * guessed_s, rel=0.01)
    assert cost.predict_s(4000) > cost.predict_s(1000)
