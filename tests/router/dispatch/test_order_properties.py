"""Who goes first: priorities are never inverted, and fairness bounds how far anybody is put back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.base.errors import OverspillError
from router.policy.registry import POLICIES
from router.values.request import InferenceRequest
from router.values.settings import Fairness
from tests.support.router_fakes import World, request, world

CALM = {"max_queue": 200, "max_sheddable_queue": 200, "max_wait_ms": 600_000.0, "overload_enter": 1.0}
ALIKE = st.fixed_dictionaries(
    {
        "prompt_tokens": st.sampled_from([20, 150, 400]),
        "max_tokens": st.sampled_from([4, 40]),
        "ttft_s": st.sampled_from([None, None, 0.6, 2.0]),
        "deadline_s": st.sampled_from([None, None, 1.5, 4.0]),
    }
)
PAIRS = st.lists(
    st.tuples(ALIKE, st.integers(-1, 2), st.integers(1, 3), st.sampled_from([0.0, 0.0, 0.1, 0.4])),
    min_size=4,
    max_size=12,
)


async def read(w: World, ask: InferenceRequest, after_s: float) -> None:
    await w.clock.sleep(after_s)
    try:
        await w.read(ask)
    except OverspillError as error:
        assert error.message  # noqa: PT017 - refused is one of the ways to end


def sent_s(w: World, ask: InferenceRequest) -> float | None:
    times = [event["at_ms"] for event in w.record(ask.request_id)["events"] if event["event"] == "sent"]
    return times[0] / 1e3 if times else None


def wish(prompt_tokens: int, max_tokens: int, ttft_s: float | None, deadline_s: float | None = None) -> dict[str, Any]:
    return {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "ttft_s": ttft_s, "deadline_s": deadline_s}


BEHIND_A_PROMPT = [
    (wish(20, 40, 2.0), -1, 3, 0.0),
    (wish(20, 40, None), -1, 2, 0.0),
    (wish(20, 40, 2.0), 1, 2, 0.1),
    (wish(20, 40, 2.0, 4.0), 2, 3, 0.0),
    (wish(20, 4, 2.0), 2, 2, 0.4),
    (wish(400, 4, None), 1, 2, 0.1),
    (wish(400, 40, 2.0, 4.0), -1, 2, 0.4),
]
"""The higher of the last two finds a slot free and a long prompt before it; the lower one finds none a little later."""


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=12, deadline=None)
@given(pairs=PAIRS)
@example(pairs=BEHIND_A_PROMPT)
def test_of_two_alike_in_all_but_priority_the_lower_never_goes_first(policy: str, pairs: list[Any]) -> None:
    """Accepted at one instant, on a device that is busy with others of any priority."""

    async def play() -> None:
        async with world(policy=policy, remote=False, **CALM) as w:
            w.local.slots = 2
            w.local.__post_init__()
            w.dispatcher.set_replicas([w.local])
            twins, work, at_s = [], [], 0.0
            for alike, low, above, gap_s in pairs:
                at_s += gap_s
                accepted_s = w.clock.now_s() + at_s
                high, lower = (
                    request(w.clock, **alike, priority=priority, accepted_at_s=accepted_s)
                    for priority in (low + above, low)
                )
                twins.append((high, lower))
                work += [read(w, high, at_s), read(w, lower, at_s)]
            await w.clock.run(asyncio.gather(*work), limit_s=600.0)
            for high, lower in twins:
                first, second = sent_s(w, high), sent_s(w, lower)
                assert second is None or (first is not None and first <= second), (high, lower)
            w.nothing_is_held()

    asyncio.run(play())


async def flooded(fairness: Fairness, policy: str = "slo-utility") -> int:
    """Two long answers among short ones that come quicker than they are served: how many went before both."""
    async with world(policy=policy, remote=False, fairness=fairness, ttft_slo_ms=300_000.0, **CALM) as w:
        w.local.slots, w.local.answer_tokens = 1, 1000
        w.local.__post_init__()
        w.dispatcher.set_replicas([w.local])
        for _ in range(20):
            await w.clock.run(w.ask(max_tokens=10, ignore_eos=True))
        served = len(w.local.sent)
        wish: dict[str, Any] = {"ignore_eos": True}
        at_s = [0.2 * i for i in range(80)]
        asks = [request(w.clock, max_tokens=10, accepted_at_s=w.clock.now_s() + after_s, **wish) for after_s in at_s]
        shorts = [asyncio.ensure_future(read(w, *of)) for of in zip(asks, at_s, strict=True)]
        await w.clock.advance(1.0)
        long = [asyncio.ensure_future(w.ask(max_tokens=300, **wish)) for _ in range(2)]
        await w.clock.run(asyncio.gather(*shorts, *long))
        w.nothing_is_held()
        asked = [ask.sampling.max_tokens for ask in w.local.sent[served:]]
        return max(index for index, tokens in enumerate(asked) if tokens == 300) - 1


async def test_fairness_bounds_how_far_long_answers_are_put_back() -> None:
    unbounded, loose, tight = [await flooded(Fairness(oldest_first=share)) for share in (0.0, 0.35, 0.5)]
    assert unbounded == 80, "every short one goes first, for as long as any comes"
    assert tight < loose < unbounded
    cost = 6.05 / 0.25  # of a long answer, in short ones
    assert loose <= 8 + cost * 0.65 / 0.35, "the older ones, then what the first long one's turn is paid with"
    assert tight <= 8 + cost


async def busy_and_small(fairness: Fairness) -> list[int]:
    """A caller with sixty requests, then one with six that take a little longer: at which places those were sent."""
    async with world(remote=False, fairness=fairness, **CALM) as w:
        w.local.slots, w.local.answer_tokens = 1, 1000
        w.local.__post_init__()
        w.dispatcher.set_replicas([w.local])
        wish: dict[str, Any] = {"ignore_eos": True, "ttft_s": 300.0}
        asks = [request(w.clock, max_tokens=10, caller="busy", **wish) for _ in range(60)]
        work = [asyncio.ensure_future(w.read(ask)) for ask in asks]
        await w.clock.advance(4.0)
        more = [request(w.clock, max_tokens=14, caller="small", **wish) for _ in range(6)]
        work += [asyncio.ensure_future(w.read(ask)) for ask in more]
        await w.clock.run(asyncio.gather(*work))
        w.nothing_is_held()
        return [index for index, ask in enumerate(w.local.sent) if ask.caller == "small"]


async def test_fairness_puts_callers_back_who_took_more_than_their_share() -> None:
    unfair, fair = [await busy_and_small(Fairness(callers=bound)) for bound in (0.0, 4.0)]
    assert unfair == list(range(60, 66)), "the dearest last, whoever asks"
    assert fair[0] < 25, "once it is there, it is its turn"
    assert fair[-1] < 50
