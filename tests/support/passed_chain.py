"""A device over a cloud tier over servers of other makers: what is passed on goes the whole way."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from router.gateway.app import GatewayLimits
from router.upstream.servers.foreign import Surroundings
from router.upstream.settings import BackendSettings
from router.upstream.source import SourceHooks
from router.upstream.sources import Sources, backend_sources
from router.values.prompt import Input, PromptSize
from router.values.prompt_size import estimate_size, no_tokenizer
from router.values.replica import ReplicaInfo
from tests.support.tiers import CLOCK, Tier, linked
from tests.support.waiting import until


class Estimates:
    """The counter of a tier that has no tokenizer."""

    def __init__(self) -> None:
        self.infos: Sequence[ReplicaInfo] = ()

    def count(self, model: str, prompt: Input) -> PromptSize:
        return estimate_size(prompt)

    def tokenizer(self, model: str) -> Any:
        raise no_tokenizer(model, self.infos)


def estimating(name: str, **deps: Any) -> Tier:
    counter = Estimates()
    tier = Tier(name, [], prompts=counter, **deps)
    counter.infos = _Infos(tier)
    return tier


class _Infos(Sequence[ReplicaInfo]):
    """What a tier's replicas are now."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def __getitem__(self, index: Any) -> Any:
        return [replica.info for replica in self._tier.dispatcher.replicas][index]

    def __len__(self) -> int:
        return len(self._tier.dispatcher.replicas)


@contextlib.asynccontextmanager
async def passing(
    *entries: BackendSettings, limits: GatewayLimits | None = None, **deps: Any
) -> AsyncIterator[tuple[Tier, Tier]]:
    """Run an edge without models over a cloud whose backends are `entries`; both serve all that those do."""
    told = {"limits": limits, **deps} if limits is not None else deps
    async with estimating("cloud", **told) as cloud, estimating("edge", **told) as edge:
        hooks = SourceHooks(
            lambda: cloud.dispatcher.set_replicas(list(sources.replicas)),
            cloud.dispatcher.probe_succeeded,
            cloud.dispatcher.probe_failed,
        )
        sources = Sources(backend_sources(entries, Surroundings(CLOCK, hooks, lambda _: None), environ={}))
        async with sources:
            await until(lambda: sources.replicas and all(r.snapshot().available for r in sources.replicas))
            async with linked(edge, cloud, []):
                await until(lambda: len(edge.dispatcher.replicas) >= len({r.info.variant for r in sources.replicas}))
                yield edge, cloud
