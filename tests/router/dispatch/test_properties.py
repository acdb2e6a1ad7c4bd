"""Whatever fails and whoever leaves: every request ends once and whole, and nothing leaves that must not."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base.errors import OverspillError, Refused
from router.policy.registry import POLICIES
from router.values.request import InferenceRequest, Objective
from router.values.settings import HedgeSettings, RouterSettings
from tests.support.router_fakes import FakeReplica, World, answer, request, world

FAULTS = st.sampled_from(
    [None, None, None, "unreachable", "crash", "invalid", "hang", "silent"]
    + [(kind, at) for kind in ("break", "stall", "silent", "empty") for at in (0, 1, 5)]
    + [("refuse", 0.3), ("refuse", 5.0)]
)
ASKS = st.fixed_dictionaries(
    {
        "prompt_tokens": st.sampled_from([1, 60, 700, 3000, 8100]),
        "max_tokens": st.sampled_from([None, 1, 12, 40]),
        "priority": st.sampled_from([-1, 0, 0, 3]),
        "locality": st.sampled_from(["any", "any", "local-only", "cloud-only"]),
        "ttft_s": st.sampled_from([None, None, 0.1, 2.0]),
        "deadline_s": st.sampled_from([None, None, 0.2, 1.0, 8.0]),
        "min_quality": st.sampled_from([0.0, 0.0, 0.9]),
        "model": st.sampled_from(["tiny", "tiny", "tiny-int8", "tiny-fp32"]),
        "session": st.sampled_from([None, "a"]),
    }
)


@dataclass
class Heard:
    """What one caller saw."""

    ask: Any
    after_s: float
    leaves_after: int | None
    request_id: str
    text: str = ""
    finished: bool = False
    error: BaseException | None = None
    route: Any = None
    left: bool = False


@dataclass
class Plan:
    asks: list[tuple[dict[str, Any], float, int | None]]
    faults: list[list[Any]]
    policy: str = "slo-utility"
    hedges: bool = False
    give_up_every_s: float = 1e9
    heard: list[Heard] = field(default_factory=list)


PLANS = st.builds(
    Plan,
    asks=st.lists(
        st.tuples(ASKS, st.sampled_from([0.0, 0.0, 0.05, 0.5, 2.0]), st.sampled_from([None, None, None, 0, 1, 4])),
        min_size=1,
        max_size=14,
    ),
    faults=st.lists(st.lists(FAULTS, max_size=6), min_size=4, max_size=4),
    policy=st.sampled_from(sorted(POLICIES)),
    hedges=st.booleans(),
    give_up_every_s=st.sampled_from([1e9, 1e9, 0.3]),
)


async def listen(w: World, heard: Heard) -> None:
    await w.clock.sleep(heard.after_s)
    heard.ask = request(w.clock, request_id=heard.request_id, **heard.ask)
    try:
        running = await w.dispatcher.start(heard.ask)
        heard.route = running.route
        try:
            chunks = 0
            async for chunk in running.chunks:
                heard.text += chunk.text
                assert not heard.finished, "a chunk after the last one"
                heard.finished = chunk.finish_reason is not None
                chunks += 1
                if heard.leaves_after is not None and chunks > heard.leaves_after and not heard.finished:
                    heard.left = True
                    return
        finally:
            await running.chunks.aclose()
    except OverspillError as error:
        heard.error = error


async def give_up(w: World, every_s: float) -> None:
    """Take the slot of somebody who has a deadline, again and again."""
    while True:
        await w.clock.sleep(every_s)
        running = list(w.dispatcher._signals.in_flight)
        gave = next((a for a in sorted(running, key=lambda a: a.sent_at_s) if a.give_up is not None), None)
        if gave is not None and gave.give_up is not None:
            gave.give_up()


async def play(plan: Plan) -> list[Any]:
    """Play a plan and check what came of it; returns all that was decided and told."""
    async with world(
        policy=plan.policy, max_queue=6, max_sheddable_queue=2, first_token_timeout_ms=4000.0, stall_timeout_ms=2000.0
    ) as w:
        for replica, faults in zip(w.all, plan.faults, strict=True):
            replica.faults = list(faults)
            replica.slots = 2
            replica.__post_init__()
        if plan.hedges:
            w.dispatcher.reconfigure(msgspec.structs.replace(w.dispatcher.settings, hedge=HedgeSettings(budget=1.0)))
            w.dispatcher._hedges.earn(60.0, 1.0)
        plan.heard = [
            Heard(dict(ask), after_s, leaves_after, f"q{index}")
            for index, (ask, after_s, leaves_after) in enumerate(plan.asks)
        ]
        giving_up = asyncio.ensure_future(give_up(w, plan.give_up_every_s))
        await w.clock.run(asyncio.gather(*(listen(w, heard) for heard in plan.heard)), limit_s=600.0)
        giving_up.cancel()
        for _ in range(60):  # a self-test may still run
            if not any(replica.open for replica in w.all):
                break
            await w.clock.advance(1.0)
        check(plan, w)
        return [w.record(heard.request_id) for heard in plan.heard] + [[a.request_id for a in r.sent] for r in w.all]


def check(plan: Plan, w: World) -> None:
    w.nothing_is_held()
    totals = Counter()
    for metric in w.dispatcher.telemetry.requests.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                totals[sample.labels["outcome"]] += int(sample.value)
    assert sum(totals.values()) == len(plan.heard), "exactly one outcome a request"
    for heard in plan.heard:
        record = w.record(heard.ask.request_id)
        assert record["outcome"] != "running"
        check_end(heard, record)
    accepted = {heard.ask.request_id: heard.ask.objective for heard in plan.heard}
    for replica, faults in zip(w.all, plan.faults, strict=True):
        sent = [ask for ask in replica.sent if not ask.request_id.startswith("self-test-")]
        ids = [ask.request_id for ask in sent]
        again = sum(count - 1 for name, count in Counter(ids).items() if not was_hedged(w, name))
        refusals = sum(isinstance(fault, tuple) and fault[0] == "refuse" for fault in faults)
        assert again <= refusals, "a replica that failed for a request is not tried again for it"
        for ask in sent:
            assert_allowed(ask, accepted[ask.request_id], replica, plan.policy)


def was_hedged(w: World, request_id: str) -> bool:
    """Whether one of two attempts may have been outrun: that one did not fail, and may be tried again."""
    return any(event["event"] == "hedged" for event in w.record(request_id)["events"])


def assert_allowed(sent: InferenceRequest, asked: Objective, replica: FakeReplica, policy: str) -> None:
    info, locality = replica.info, asked.locality.value
    assert sent.objective.locality is asked.locality, "stamped once, and never loosened"
    assert sent.objective.min_quality == asked.min_quality
    assert not (info.remote and "local-only" in {locality, policy})
    assert info.remote or locality != "cloud-only"
    assert sent.model in {info.family, info.variant}
    assert info.quality >= asked.min_quality
    assert sent.prompt_tokens < info.context_tokens


def check_end(heard: Heard, record: dict[str, Any]) -> None:
    cap = (heard.route.max_tokens if heard.route else None) or heard.ask.sampling.max_tokens or 24
    assert answer(cap).startswith(heard.text), "text was doubled or lost"
    events = {event["event"] for event in record["events"]}
    deadline_s = heard.ask.objective.deadline_s
    if "given_up" in events and heard.finished and heard.text != answer(min(cap, 24)):
        assert record["outcome"] == "degraded", "never silently"
    if deadline_s is not None and "failover" not in events:
        assert record["finish_ms"] <= deadline_s * 1e3 + 1, "a deadline is hard, but for the rest of what broke"
    if heard.finished and {"deadline", "given_up"} & events:
        assert record["outcome"] == "degraded" or heard.text == answer(min(cap, 24))
        assert heard.text
    elif heard.finished:
        assert record["outcome"] in {"completed", "degraded"}
        assert heard.text == answer(min(cap, 24))
    elif heard.left:
        assert record["outcome"] == "cancelled"
    else:
        assert heard.error is not None, "a stream ended without a finish reason and without an error"
    if isinstance(heard.error, Refused):
        assert math.isfinite(heard.error.retry_after_s)
        assert heard.error.retry_after_s > 0


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(plan=PLANS)
def test_every_request_ends_once_whole_and_where_it_may(plan: Plan) -> None:
    asyncio.run(play(plan))


@settings(max_examples=25, deadline=None)
@given(plan=PLANS)
def test_the_same_events_are_decided_the_same_way_twice(plan: Plan) -> None:
    """Also where a policy draws at random, and whatever was learnt on the way."""
    first = asyncio.run(play(plan))
    again = asyncio.run(play(plan))
    for one, other in zip(first, again, strict=True):
        assert one == other


@settings(max_examples=25, deadline=None)
@given(
    at_s=st.lists(st.sampled_from([0.0, 0.01, 0.2, 1.0]), min_size=4, max_size=16),
    cancel_after_s=st.lists(st.sampled_from([0.0, 0.015, 0.11, 0.5, 3.0]), min_size=4, max_size=4),
    reconfigure=st.booleans(),
)
def test_callers_may_leave_at_any_moment(at_s: list[float], cancel_after_s: list[float], reconfigure: bool) -> None:
    async def one(w: World, start_s: float, cancel_s: float | None) -> None:
        await w.clock.sleep(start_s)
        task = asyncio.ensure_future(w.ask(max_tokens=24))
        if cancel_s is not None:
            await w.clock.sleep(cancel_s)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def all_of_them() -> None:
        async with world(max_queue=8) as w:
            cancels = [*cancel_after_s, *[None] * len(at_s)]
            work = [one(w, start_s, cancel_s) for start_s, cancel_s in zip(at_s, cancels, strict=False)]
            if reconfigure:
                w.dispatcher.reconfigure(RouterSettings(max_queue=2))
            await w.clock.run(asyncio.gather(*work), limit_s=600.0)
            w.nothing_is_held()

    asyncio.run(all_of_them())
