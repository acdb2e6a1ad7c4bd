"""No request content opens a breaker, whatever replicas make of it; one that fails on our own word is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base.errors import OverspillError, ReplicaBroken, ReplicaFailed, ReplicaUnreachable, RequestFailed, Shed
from router.values.chunk import TokenChunk
from router.values.prompt import ChatPrompt, Message, TextPrompt
from router.values.request import InferenceRequest
from router.values.settings import BreakerSettings, HedgeSettings
from tests.support.gateway_fakes import prompt_text
from tests.support.router_fakes import UPSTREAM, FakeReplica, World, answer, request, world

STRICT = BreakerSettings(failures=2, window=4, open_ms=1000.0, max_open_ms=64_000.0)
RAISED = {
    "error": ReplicaFailed("HTTP 500"),
    "unreachable": ReplicaUnreachable("its process died of it"),
    "crash": ZeroDivisionError("a bug"),
    "request failed": RequestFailed("NaN"),
}
WAYS = (*RAISED, "break", "stall", "silent", "empty", "hang")
WISHES = ({}, {"deadline_s": 3.0}, {"max_tokens": 12}, {"deadline_s": 3.0, "ttft_s": 0.5})


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


def poisoned(replica: FakeReplica, ways: dict[str, list[str]]) -> None:
    """Let a replica answer each marked text with one way to fail after another, again and again; all else is served."""
    real, turn = replica.generate, dict.fromkeys(ways, 0)

    async def generate(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        text = prompt_text(request.prompt)
        if text not in ways:
            async for chunk in real(request):
                yield chunk
            return
        way = ways[text][turn[text] % len(ways[text])]
        turn[text] += 1
        if way in RAISED:
            raise RAISED[way]
        if way in {"break", "stall", "empty"}:
            yield TokenChunk("" if way == "empty" else "w0 ")
        if way == "break":
            raise ReplicaBroken("gone")
        if way in {"stall", "hang"}:
            await replica.clock.sleep(1e9)

    replica.generate = generate


async def ends(w: World, ask: InferenceRequest) -> BaseException | None:
    try:
        await w.read(ask)
    except OverspillError as error:
        return error
    return None


def states(w: World) -> set[str]:
    return set(w.dispatcher.breaker_states().values())


@settings(max_examples=40)
@given(
    ways=st.lists(st.lists(st.sampled_from(WAYS), min_size=1, max_size=4), min_size=1, max_size=8),
    order=st.lists(st.integers(0, 9), min_size=4, max_size=24),
    how=st.fixed_dictionaries({"chat": st.booleans(), "together": st.booleans(), "hedged": st.booleans()}),
    wish=st.builds(
        lambda wish, where: {**wish, "locality": where},
        st.sampled_from(WISHES),
        st.sampled_from(["any", "local-only", "cloud-only"]),
    ),
)
def test_no_content_opens_a_breaker_whatever_replicas_make_of_it(
    ways: list[list[str]], order: list[int], how: dict[str, bool], wish: dict[str, Any]
) -> None:
    """Up to eight distinct prompts, each failing in any sequence of ways, with good ones beside them or without."""

    async def play() -> None:
        limits: dict[str, Any] = {"first_token_timeout_ms": 2000.0, "stall_timeout_ms": 1000.0, "max_queue": 1000}
        async with world(breaker=STRICT, hedge=HedgeSettings(enabled=how["hedged"], budget=1.0), **limits) as w:
            for replica in w.all:
                poisoned(replica, {f"poison {index}": list(of_one) for index, of_one in enumerate(ways)})
            asks = []
            for index in order:
                text = f"poison {index}" if index < len(ways) else "hello"
                prompt = ChatPrompt((Message("user", text),)) if how["chat"] else TextPrompt(text)
                ask = request(w.clock, prompt=prompt, **wish)
                if how["together"]:
                    asks.append(ends(w, ask))
                    continue
                await w.clock.run(ends(w, ask), limit_s=600.0)
                assert states(w) <= {"closed"}
            if asks:
                await w.clock.run(asyncio.gather(*asks), limit_s=600.0)
            await w.clock.advance(10.0)
            assert states(w) <= {"closed"}
            for sample in w.dispatcher.telemetry.breaker_changes.collect()[0].samples:
                assert sample.labels["state"] == "closed", "none opened in between"
            for replica in w.all:
                route, text = await w.clock.run(w.ask(model=replica.info.variant, max_tokens=4))
                assert (route.variant, text) == (replica.info.variant, answer(4))
            w.nothing_is_held()

    asyncio.run(play())


@settings(max_examples=15)
@given(way=st.sampled_from(WAYS), trials=st.integers(1, 4))
def test_no_content_keeps_a_breaker_open_that_probes_opened(way: str, trials: int) -> None:
    async def play() -> None:
        async with world(breaker=STRICT, first_token_timeout_ms=2000.0, stall_timeout_ms=1000.0) as w:
            w.dispatcher.set_replicas([w.cloud])
            poisoned(w.cloud, {f"poison {index}": [way] for index in range(trials)})
            for _ in range(2):
                w.dispatcher.probe_failed(UPSTREAM, "no answer")
            assert states(w) == {"open"}
            await w.clock.advance(1.01)
            for index in range(trials):
                await w.clock.run(ends(w, request(w.clock, prompt=TextPrompt(f"poison {index}"))))
                await w.clock.advance(5.0)
                assert "open" not in states(w)
            assert (await w.clock.run(w.ask(max_tokens=4)))[1] == answer(4)
            assert states(w) == {"closed"}

    asyncio.run(play())


async def fail_three(w: World) -> None:
    for index in range(3):
        await w.clock.run(ends(w, request(w.clock, prompt=TextPrompt(f"prompt {index}"), locality="cloud-only")))
    await w.clock.settle()


@pytest.mark.parametrize("fault", ["unreachable", "crash", ("break", 0), "hang"])
async def test_a_replica_that_fails_on_our_own_word_is_left_alone(fault: Any) -> None:
    async with world(first_token_timeout_ms=2000.0) as w:
        w.dispatcher.set_replicas([w.local, w.cloud])
        w.cloud.faults = [fault] * 50
        await fail_three(w)
        await w.clock.advance(2.0)
        assert w.dispatcher.breaker_states()[UPSTREAM] in {"open", "half_open"}
        (test,) = [ask for ask in w.cloud.sent if ask.request_id.startswith("self-test")][:1]
        assert (test.sampling.max_tokens, test.model, test.attempts_left) == (1, "tiny-fp32", 1)
        assert test.prompt == TextPrompt("Hello"), "nothing of any caller's"


async def test_a_self_test_that_is_refused_says_nothing_and_the_next_failure_asks_again() -> None:
    async with world() as w:
        w.dispatcher.set_replicas([w.cloud])
        refusal = Shed("full", retry_after_s=0.1)
        kinds: list[str] = []

        async def generate(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
            test = request.request_id.startswith("self-test")
            kinds.append("test" if test else "ask")
            raise refusal if test else ReplicaFailed("HTTP 500")
            yield

        w.cloud.generate = generate
        await fail_three(w)
        assert w.dispatcher.breaker_states()[UPSTREAM] == "closed"
        await w.clock.run(ends(w, request(w.clock, prompt=TextPrompt("another"))))
        await w.clock.settle()
        assert kinds == ["ask", "ask", "ask", "test", "ask", "test"]
        results = w.dispatcher.telemetry.registry.get_sample_value
        assert results("overspill_self_tests_total", {"endpoint": UPSTREAM, "result": "untold"}) == 2


async def test_a_tier_that_ends_ends_its_self_tests() -> None:
    async with world(first_token_timeout_ms=60_000.0) as w:
        w.dispatcher.set_replicas([w.cloud])
        w.cloud.faults = ["crash", "crash", "crash", "hang"]
        await fail_three(w)
        assert w.cloud.open == 1
    assert w.cloud.open == 0


async def test_who_waits_for_an_endpoint_hears_that_it_is_trusted_again() -> None:
    async with world(breaker=STRICT) as w:
        w.dispatcher.set_replicas([w.cloud])
        for _ in range(2):
            w.dispatcher.probe_failed(UPSTREAM, "no answer")
        await w.clock.advance(1.01)
        w.cloud.faults = ["crash"]
        await w.clock.run(ends(w, request(w.clock, prompt=TextPrompt("trial"))))
        assert states(w) == {"half_open"}, "the self-test is the trial now"
        assert (await w.clock.run(w.ask(max_tokens=4)))[1] == answer(4), "it waited for the verdict"
        assert states(w) == {"closed"}
