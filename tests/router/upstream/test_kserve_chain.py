"""A tier of ours behind a tier of ours over KServe V2: what one asks, the other understands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from router.base.clock import MonotonicClock
from router.upstream.servers.foreign import Surroundings
from router.upstream.settings import BackendSettings
from router.upstream.source import ReplicaSource, SourceHooks
from router.upstream.sources import backend_sources
from router.values.chunk import FinishReason
from router.values.prompt import TextPrompt
from router.values.replica import Replica
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from tests.support.gateway_fakes import replica_info
from tests.support.tiers import WORDS, Reciter, Tier
from tests.support.waiting import until

CLOCK = MonotonicClock()


@contextlib.asynccontextmanager
async def behind(tier: Tier) -> AsyncIterator[ReplicaSource]:
    fields = {"name": "site", "kind": "kserve", "urls": [tier.url], "poll_interval_s": 0.1, "warm_up": False}
    settings = msgspec.convert(fields, BackendSettings)
    (source,) = backend_sources([settings], Surroundings(CLOCK, SourceHooks(), lambda _: None), environ={})
    async with source:
        yield source


async def replica_of(source: ReplicaSource) -> Replica:
    """The one replica: the index names its family too, which is no model more."""
    await until(lambda: source.replicas and source.replicas[0].snapshot().available)
    (replica,) = source.replicas
    assert replica.info.variant == "tiny-fp32"
    return replica


def ask(**sampling) -> InferenceRequest:
    return InferenceRequest(
        request_id="chain",
        model="any",
        prompt=TextPrompt("recite"),
        sampling=SamplingParams(**{"max_tokens": 32, **sampling}),
        objective=Objective(),
        prompt_tokens=1,
        accepted_at_s=CLOCK.now_s(),
    )


async def test_our_own_surface_is_discovered_with_its_window_and_its_slots_and_streams() -> None:
    reciter = Reciter(replica_info("tiny-fp32", 0))
    async with Tier("cloud", [reciter]) as tier, behind(tier) as source:
        replica = await replica_of(source)
        assert (replica.info.variant, replica.info.context_tokens) == ("tiny-fp32", 2048)
        assert replica.snapshot().slots == 4
        reciter.pause = asyncio.Event()
        chunks = []
        async for chunk in replica.generate(ask(temperature=0.5, seed=7, min_p=0.1, stop=("zzz",))):
            chunks.append(chunk)
            reciter.pause.set()  # the first piece is here, and the rest is not made yet
    assert "".join(chunk.text for chunk in chunks) == " ".join(WORDS)
    assert len(chunks) > 2, "piece by piece"
    assert sum(chunk.tokens for chunk in chunks) == len(WORDS)
    assert chunks[-1].finish_reason is FinishReason.STOP
    seen = reciter.requests[0]
    assert seen.prompt == TextPrompt("recite")
    assert (seen.sampling.temperature, seen.sampling.seed, seen.sampling.min_p) == (0.5, 7, 0.1)


async def test_a_model_that_is_away_there_is_away_here_until_it_is_back() -> None:
    reciter = Reciter(replica_info("tiny-fp32", 0))
    async with Tier("cloud", [reciter]) as tier, behind(tier) as source:
        replica = await replica_of(source)
        reciter.available = False
        await until(lambda: not replica.snapshot().available)
        assert "off" in replica.snapshot().why
        reciter.available = True
        await until(lambda: replica.snapshot().available)
