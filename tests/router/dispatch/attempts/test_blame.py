"""Whose fault an error is: what one request holds keeps nobody else from a replica."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base import errors
from router.base.errors import (
    DeadlineLost,
    Evicted,
    InvalidRequest,
    OverspillError,
    PromiseLost,
    ReplicaBroken,
    ReplicaFailed,
    ReplicasFailed,
    ReplicaUnreachable,
    Shed,
    Unavailable,
)
from router.dispatch.attempts.blame import Verdict, outcome_of, source_of, verdict
from router.values.feature import Feature
from router.values.prompt import ChatPrompt, Input, MediaPart, Message, TextPrompt
from router.values.request import Outcome
from router.values.settings import BreakerSettings
from router.values.task import TensorCall
from router.values.tensors import NamedTensor
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import UPSTREAM, World, answer, request, world

REFUSAL_S = 5.0
LONG = BreakerSettings(open_ms=3_600_000.0, max_open_ms=3_600_000.0)


def every_error() -> list[BaseException]:
    """One of each class of the tree, and what no tree holds."""
    found: list[BaseException] = [ZeroDivisionError("a bug"), UnicodeEncodeError("ascii", "ü", 0, 1, "no"), OSError(5)]
    classes = [errors.OverspillError]
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        what = {"what": "requests"} if issubclass(kind, errors.RateLimited) else {}
        refused = issubclass(kind, errors.Refused)
        found.append(kind("why", retry_after_s=REFUSAL_S, **what) if refused else kind("why"))  # type: ignore[call-arg]
    return found


EVERY_ERROR = every_error()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Traces of the crashes that are provoked here take longer to draw than everything else."""
    with structlog.testing.capture_logs():
        yield


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("x"), Verdict.REQUEST),
        (errors.ContextTooLong("x"), Verdict.REQUEST),
        (DeadlineLost("x", retry_after_s=1), Verdict.REFUSED_ONE),
        (PromiseLost("x", retry_after_s=1), Verdict.REFUSED_ONE),
        (ReplicasFailed("x", retry_after_s=1), Verdict.REFUSED_ONE),
        (errors.BodyShed("x", retry_after_s=1), Verdict.REFUSED_ONE),
        (errors.RequestFailed("x"), Verdict.REFUSED_ONE),
        (errors.ReplicaCrashed("x"), Verdict.FAILED),
        (Shed("x", retry_after_s=1), Verdict.REFUSED_CLASS),
        (Evicted("x", retry_after_s=1), Verdict.REFUSED_CLASS),
        (Unavailable("x", retry_after_s=1), Verdict.REFUSED_ALL),
        (ReplicaUnreachable("x"), Verdict.DOWN),
        (ReplicaFailed("x"), Verdict.FAILED),
        (ReplicaBroken("x"), Verdict.FAILED),
        (errors.LinkLost("x"), Verdict.LINK),
        (ZeroDivisionError(), Verdict.FAILED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.value,
)
def test_every_error_has_its_verdict(error: BaseException, expected: Verdict) -> None:
    assert verdict(error) is expected


def test_a_failure_of_one_prompt_has_one_source_however_it_is_asked_again() -> None:
    clock = VirtualClock()

    def ask(text: str, **changes: Any) -> str:
        return source_of(request(clock, prompt=ChatPrompt((Message("user", text),)), **changes), Verdict.FAILED)

    assert ask("a") == ask("a", max_tokens=3, priority=9)
    assert ask("a") != ask("b")
    assert ask("\ud800")  # a lone surrogate has a digest too
    down = request(clock)
    assert source_of(down, Verdict.DOWN) != source_of(request(clock), Verdict.DOWN)
    assert source_of(down, Verdict.DOWN) == source_of(down, Verdict.DOWN)


def test_a_callers_400_is_invalid_and_no_failure() -> None:
    assert outcome_of(InvalidRequest("x")) is Outcome.INVALID
    assert outcome_of(Evicted("x", retry_after_s=1)) is Outcome.EVICTED
    assert outcome_of(Shed("x", retry_after_s=1)) is Outcome.SHED
    assert outcome_of(DeadlineLost("x", retry_after_s=1)) is Outcome.UNAVAILABLE
    assert outcome_of(ReplicaBroken("x")) is Outcome.FAILED


def fails_for(replica: Any, marked: str, error: BaseException, after: int = 0) -> None:
    """Make a replica raise `error` for every request whose prompt is `marked`, after so many tokens."""
    real = replica.generate

    async def generate(ask: Any):
        stream, left = real(ask), after
        try:
            async for chunk in stream:
                if ask.prompt == TextPrompt(marked):
                    if not left:
                        raise error
                    left -= 1
                yield chunk
        finally:
            await stream.aclose()

    replica.generate = generate


async def ends(w: World, **ask: Any) -> BaseException | None:
    try:
        await w.ask(**ask)
    except OverspillError as error:
        return error
    return None


async def others_are_served(w: World) -> None:
    for replica in w.all:
        route, text = await w.ask(model=replica.info.variant, max_tokens=4)
        assert (route.variant, text) == (replica.info.variant, answer(4))


@settings(max_examples=25)
@given(
    error=st.sampled_from(EVERY_ERROR),
    after=st.sampled_from([0, 0, 2]),
    marked=st.text(max_size=20).filter(lambda text: text != "hello"),
    asks=st.lists(
        st.fixed_dictionaries(
            {
                "prompt_tokens": st.sampled_from([1, 60, 1900, 8000]),
                "max_tokens": st.sampled_from([None, 1, 12, 40]),
                "priority": st.sampled_from([-5, -1]),
                "ttft_s": st.sampled_from([None, 0.001, 2.0]),
                "deadline_s": st.sampled_from([None, 0.05, 8.0]),
                "locality": st.sampled_from(["any", "local-only", "cloud-only"]),
            }
        ),
        min_size=3,
        max_size=4,
    ),
)
def test_no_request_opens_a_breaker_or_cools_a_rung_for_others(
    error: BaseException, after: int, marked: str, asks: list[dict[str, Any]]
) -> None:
    """Whatever replicas make of one prompt, sent as often and as variously as anyone likes."""
    if verdict(error) in {Verdict.REFUSED_ALL, Verdict.DOWN}:
        return  # these speak for the replica, and no request can cause them

    async def play() -> None:
        async with world(breaker=BreakerSettings(failures=2, window=4)) as w:
            for replica in w.all:
                fails_for(replica, marked, error, after)
            for ask in asks:
                await w.clock.run(ends(w, prompt=TextPrompt(marked), **ask))
                assert set(w.dispatcher.breaker_states().values()) <= {"closed"}
                assert not any(w.dispatcher._signals.health.of(replica.snapshot()).against(0) for replica in w.all)
            await w.clock.run(others_are_served(w))
            w.nothing_is_held()

    asyncio.run(play())


async def test_a_poison_prompt_alone_and_retried_opens_no_breaker() -> None:
    async with world() as w:
        for replica in w.all:
            fails_for(replica, "poison", ReplicaFailed("HTTP 500"))
        for _ in range(10):
            error = await w.clock.run(ends(w, prompt=TextPrompt("poison"), locality="cloud-only"))
            assert isinstance(error, ReplicasFailed)
        assert w.dispatcher.breaker_states() == {UPSTREAM: "closed"}
        assert {found.outcome for found in w.dispatcher._log} == {Outcome.UNAVAILABLE}


async def test_a_replica_that_fails_on_distinct_prompts_is_left_alone() -> None:
    async with world(breaker=LONG) as w:
        w.cloud.faults = w.cloud_small.faults = ["crash"] * 20
        for index in range(3):
            await w.clock.run(ends(w, prompt=TextPrompt(f"prompt {index}"), locality="cloud-only"))
        assert w.dispatcher.breaker_states()[UPSTREAM] == "open"


async def test_one_request_counts_once_for_all_rungs_of_an_endpoint() -> None:
    async with world() as w:
        w.cloud.faults = w.cloud_small.faults = ["unreachable"] * 20
        for expected in ("closed", "closed", "open"):
            await w.clock.run(ends(w, locality="cloud-only"))
            assert w.dispatcher.breaker_states()[UPSTREAM] == expected


async def test_poison_as_the_trial_of_half_open_does_not_open_it_again() -> None:
    async with world(breaker=LONG) as w:
        w.dispatcher.set_replicas([w.cloud])
        fails_for(w.cloud, "poison", ReplicaFailed("HTTP 500"))
        w.cloud.faults = [None, "crash", "crash", "crash"]  # the last one: the self-test
        for text in ("poison", "a", "b"):
            await w.clock.run(ends(w, prompt=TextPrompt(text)))
        assert w.dispatcher.breaker_states()[UPSTREAM] == "open"
        await w.clock.advance(3601.0)
        for _ in range(3):
            await w.clock.run(ends(w, prompt=TextPrompt("poison")))
            assert w.dispatcher.breaker_states()[UPSTREAM] == "half_open"
        assert (await w.clock.run(w.ask(max_tokens=4)))[1] == answer(4)
        assert w.dispatcher.breaker_states()[UPSTREAM] == "closed"


@pytest.mark.parametrize("kind", [DeadlineLost, PromiseLost, ReplicasFailed, errors.BodyShed])
async def test_a_refusal_for_one_request_cools_nothing_down(kind: type[errors.Refused]) -> None:
    async with world() as w:
        w.dispatcher.set_replicas([w.local, w.cloud])
        fails_for(w.cloud, "mine", kind("not this one", retry_after_s=REFUSAL_S))
        error = await w.clock.run(ends(w, prompt=TextPrompt("mine"), locality="cloud-only"))
        assert isinstance(error, kind)
        route, _ = await w.clock.run(w.ask(locality="cloud-only", max_tokens=4))
        assert route.tier == "cloud"
        assert len(w.cloud.sent) == 2


async def test_a_429_keeps_away_its_priority_and_below_and_nobody_above() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        fails_for(w.local, "mine", Shed("the queue is full", retry_after_s=REFUSAL_S))
        mine = asyncio.ensure_future(ends(w, prompt=TextPrompt("mine"), deadline_s=1.0))
        await w.clock.settle()
        began_s = w.clock.now_s()
        await w.clock.run(w.ask(priority=1, max_tokens=4))
        assert w.clock.now_s() - began_s < 1.0
        await w.clock.run(w.ask(priority=0, max_tokens=4))
        assert w.clock.now_s() - began_s >= REFUSAL_S, "it waited for the cool-down"
        assert isinstance(await mine, DeadlineLost)


async def test_a_503_without_capacity_keeps_everyone_away() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.faults = [("refuse", REFUSAL_S)]
        began_s = w.clock.now_s()
        await w.clock.run(w.ask(priority=9, max_tokens=4))
        assert w.clock.now_s() - began_s >= REFUSAL_S


@pytest.mark.interpreted
async def test_a_wait_that_ended_on_another_replica_teaches_nothing() -> None:
    async with world(remote=False, ttft_slo_ms=60_000.0) as w:
        learnt = []
        real = w.dispatcher._signals.latency.observe_wait
        w.dispatcher._signals.latency.observe_wait = lambda info, *rest: learnt.append(info) or real(info, *rest)
        w.dispatcher.set_replicas([w.local])
        w.local.others = 4
        waiting = asyncio.ensure_future(w.ask(max_tokens=4))
        await w.clock.advance(1.0)
        w.local.available = False
        w.dispatcher.set_replicas([w.local, w.small])
        assert (await w.clock.run(asyncio.wait_for(waiting, None)))[0].variant == "tiny-pruned-int8"
        assert learnt == []


@pytest.mark.parametrize(
    "prompt",
    [
        TensorCall((NamedTensor("x", "UINT8", (1, 1 << 20), bytes(1 << 20)),)),
        ChatPrompt((Message("user", "see", parts=("see", MediaPart(Feature.IMAGES, bytes(1 << 20)))),)),
    ],
    ids=["tensor", "image"],
)
def test_megabytes_that_fail_are_not_spelt_out(prompt: Input) -> None:
    """It is done on the event loop: of 15 MB it took a third of a second and 100 MB, with each failed attempt."""
    asked = request(VirtualClock(), prompt=prompt)
    tracemalloc.start()
    try:
        found = source_of(asked, Verdict.FAILED)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == source_of(asked, Verdict.FAILED)
    assert most_bytes < 5 << 20
