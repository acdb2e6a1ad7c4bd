"""A whole tier with tenants, an operator, jobs, caches and a repository, over replicas that say whose request it is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import httpx
import numpy as np

from benchmarks.tenants.house import Words
from router.base.clock import MonotonicClock
from router.base.errors import ModelNotFound
from router.cache.exact import AnswerCache
from router.cache.meaning import Vector
from router.cache.settings import CacheSettings
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.telemetry import Telemetry
from router.gateway.app import create_app
from router.gateway.deps import GatewayDeps
from router.gateway.jobs.calls import Calls
from router.jobs.jobs import Jobs
from router.jobs.settings import JobsSettings
from router.tenants.keys_file import digest_of
from router.tenants.tenancy import KeySources, Tenancy
from router.tenants.tenant import Tenant
from router.values.chunk import FinishReason, TokenChunk
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.repository import ModelState
from router.values.request import InferenceRequest
from router.values.settings import RouterSettings
from router.values.task import EmbedCall, Embeddings, Passed, PassedCall, Task

SECRET_MODEL = "secret-model-of-red"  # noqa: S105 - a name
AWAY = "away"
EMBEDS = "embeds"
PASSES = "passes"
OPERATOR = "operator"
MARKS = {"red": "vermilion", "green": "viridian", "blue": "ultramarine", OPERATOR: "whitewash"}
_TASKS = {
    EMBEDS: frozenset({Task.EMBED}),
    PASSES: frozenset({Task.RERANK, Task.SCORE, Task.TRANSCRIBE, Task.TRANSLATE, Task.SPEAK}),
}
KEYS = {name: f"key-of-{name}-0123456789abcdef" for name in MARKS}


class Says:
    """A replica that says whose request it answers."""

    link = None

    def __init__(self, variant: str, names: dict[str, str]) -> None:
        self.info = ReplicaInfo(
            replica_id=f"local/{variant}",
            endpoint=f"local/{variant}",
            tier="cloud",
            remote=False,
            family=variant,
            variant=variant,
            rung=0,
            quality=1.0,
            context_tokens=4096,
            prior=SpeedPrior(900.0, 60.0, 0.1, "test"),
            tasks=_TASKS.get(variant, frozenset({Task.GENERATE})),
        )
        self._names = names

    def snapshot(self) -> ReplicaSnapshot:
        here = self.info.variant != AWAY
        return ReplicaSnapshot(self.info, available=here, slots=64, why="" if here else "away")

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        if isinstance(request.prompt, EmbedCall):
            data = np.ones(len(request.prompt.inputs), dtype="<f4").tobytes()
            yield TokenChunk("", 1, FinishReason.STOP, output=Embeddings(data, 1))
            return
        if isinstance(request.prompt, PassedCall):
            told = json.dumps({"model": self.info.variant, "text": f"I answer {MARKS[self._names[request.caller]]}"})
            yield TokenChunk("", 1, output=Passed(told.encode(), "application/json"))
            yield TokenChunk("", 0, FinishReason.STOP)
            return
        yield TokenChunk(f"I answer {MARKS[self._names[request.caller]]}")
        yield TokenChunk("", 0, FinishReason.STOP)


class Shelf:
    """A repository that notes what it was asked for."""

    def __init__(self) -> None:
        self.changes = 0

    def unloaded(self) -> Sequence[ModelState]:
        return (ModelState(name="shelved", state="UNAVAILABLE"),)

    async def load(self, name: str) -> None:
        self._change(name)

    async def unload(self, name: str) -> None:
        self._change(name)

    def _change(self, name: str) -> None:
        self.changes += 1
        if name == "none":
            raise ModelNotFound.of(name, [])


async def all_alike(_request: InferenceRequest, _text: str) -> Vector:
    """To this cache everything means the same."""
    return np.ones(1, dtype=np.float32)


def keys_file() -> str:
    """Three tenants, of which one alone may use the secret model, and the operator."""
    limits = [f"tenant {name} models=tiny,{AWAY},{EMBEDS},{PASSES}" for name in KEYS if name not in {"red", OPERATOR}]
    roles = {name: " role=operator" if name == OPERATOR else "" for name in KEYS}
    return "\n".join([*limits, *(f"key {n} sha256:{digest_of(key.encode())}{roles[n]}" for n, key in KEYS.items())])


@contextlib.asynccontextmanager
async def surface(folder: Path, seed: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the tier while it runs."""
    path = folder / "keys"
    path.write_text(keys_file())
    names = {Tenant.named(name).digest: name for name in KEYS}
    clock, telemetry = MonotonicClock(), Telemetry()
    replicas = [Says(model, names) for model in ("tiny", SECRET_MODEL, AWAY, EMBEDS, PASSES)]
    infos = [replica.info for replica in replicas]
    jobs = JobsSettings(dir=str(folder / "jobs"), min_free_mbytes=0)
    cache = CacheSettings(max_mbytes=1, similar_above=0.9, embedding_model=EMBEDS)
    async with contextlib.AsyncExitStack() as stack:
        dispatcher = Dispatcher(replicas, RouterSettings(), clock=clock, telemetry=telemetry, seed=seed)
        await stack.enter_async_context(dispatcher)
        deps = GatewayDeps(
            dispatcher=dispatcher,
            prompts=Words(),
            tier="cloud",
            telemetry=telemetry,
            clock=clock,
            models=lambda: infos,
            tenancy=Tenancy(KeySources(path=path).directory(), clock),
            cache=AnswerCache(cache, clock, lambda: infos),
            embed=all_alike,
            repository=Shelf(),
            scale=lambda model: {} if model is None else None,
            jobs=await stack.enter_async_context(Jobs(jobs, clock, dispatcher)),
        )
        app = create_app(deps)
        if deps.jobs is not None:
            await deps.jobs.serve(Calls(app.api.router, deps.tenancy.directory))
            stack.push_async_callback(deps.jobs.stop)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        yield await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://tier", timeout=60)
        )
