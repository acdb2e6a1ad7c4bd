"""Real vLLM servers that the tier starts: served, killed, started again; in parallel; and as a pair that hands over."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloud_tier.engines.command import ServerSpec, share_cores
from cloud_tier.engines.settings import CloudBackend, VllmSettings
from cloud_tier.engines.vllm import VllmServer
from router.base.clock import MonotonicClock
from router.base.errors import ReplicaBroken
from router.upstream.disaggregated import Disaggregated, DisaggregatedReplica
from router.upstream.servers.foreign import Surroundings
from router.upstream.settings import BackendModel
from router.upstream.source import ReplicaSource, SourceHooks
from router.values.prompt import ChatPrompt, Message
from router.values.replica import Replica
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from tests.cloud_tier.engines.test_process import alive
from tests.support.live_servers import live_folder, live_python
from tests.support.waiting import until

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

PATIENCE_S = 500.0
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ARGS = ("--max-model-len", "1024", "--dtype", "bfloat16")
EAGER = ("--enforce-eager",)
CORES = sorted(os.sched_getaffinity(0))


def spec(
    model: Path, *args: str, bind: str = "", speeds: tuple[float, float] | None = None, **changes: Any
) -> ServerSpec:
    python = Path(live_python("OVERSPILL_LIVE_VLLM"))
    of_backend = {key: changes.pop(key) for key in ("role", "kv_connector") if key in changes}
    settings = VllmSettings(
        model=str(model),
        served="tiny",
        executable=str(python.with_name("vllm")),
        args=(*ARGS, *args),
        env=ENV,
        silent_s=600.0,
        **changes,
    )
    prefill, decode = speeds or (None, None)
    told = BackendModel(served="tiny", prefill_tokens_per_s=prefill, decode_tokens_per_s=decode)
    backend = CloudBackend(name="big", kind="vllm", vllm=settings, warm_up=False, models=(told,), **of_backend)
    found = ServerSpec(backend, settings)
    return replace(found, cpu_bind=bind or share_cores([settings.ranks], CORES)[0])


def server(of: ServerSpec) -> VllmServer:
    return VllmServer(of, Surroundings(MonotonicClock(), SourceHooks(), lambda _: None, tier="cloud"))


async def ready(source: ReplicaSource) -> Replica:
    """The one replica, once it serves."""
    await until(lambda: source.replicas[0].snapshot().available, PATIENCE_S, every_s=0.1)
    (replica,) = source.replicas
    return replica


def ask(text: str = "Who wrote Hamlet?", max_tokens: int = 12) -> InferenceRequest:
    return InferenceRequest(
        request_id="live",
        model="tiny",
        prompt=ChatPrompt((Message("user", text),)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        objective=Objective(),
        prompt_tokens=2 * len(text.split()),
        accepted_at_s=MonotonicClock().now_s(),
    )


async def text_of(replica: Replica, request: InferenceRequest) -> str:
    return "".join([chunk.text async for chunk in replica.generate(request)])


async def test_it_serves_and_after_a_kill_of_its_group_in_mid_answer_it_serves_the_same_again() -> None:
    async with server(spec(live_folder("OVERSPILL_LIVE_VLLM_MODEL"), *EAGER)) as source:
        replica = await ready(source)
        whole = await text_of(replica, ask())
        assert whole
        group = source.pid
        assert group is not None
        stream = replica.generate(ask("Tell me a long story.", 400))
        got = [(await anext(stream)).text]
        os.killpg(group, signal.SIGKILL)
        with pytest.raises(ReplicaBroken):
            got += [chunk.text async for chunk in stream]
        assert "".join(got)
        await until(lambda: not source.replicas[0].snapshot().available)
        assert source.replicas[0].snapshot().back_in_s > 0
        again = await ready(source)
        assert source.restarts == 1
        assert await text_of(again, ask()) == whole
        group = source.pid
    assert group is not None
    assert not alive(group)


def of_eight_heads(model: Path, folder: Path) -> Path:
    """The model's tokenizer with the shape of another one, whose heads can be divided by two."""
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").unlink()
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 32}
    config |= {**shape, "num_attention_heads": 8, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
async def test_two_ranks_answer_and_leave_nothing_behind(kind: str, tmp_path: Path) -> None:
    model = live_folder("OVERSPILL_LIVE_VLLM_MODEL")
    # Eager, a pipeline is healthy and dies of its first request.
    args: tuple[str, ...] = () if kind == "pipeline" else EAGER
    if kind == "tensor":
        model, args = of_eight_heads(model, tmp_path), (*EAGER, "--load-format", "dummy")
    degree: dict[str, Any] = {f"{kind}_parallel": 2}
    async with server(spec(model, *args, **degree)) as source:
        replica = await ready(source)
        assert await text_of(replica, ask())
        if kind != "tensor":
            assert "Shakespeare" in await text_of(replica, ask(max_tokens=24))
        group = source.pid
        assert source.restarts == 0
    assert group is not None
    assert not alive(group)


@contextlib.asynccontextmanager
async def pair(connector: Any, folder: Path) -> AsyncIterator[Disaggregated]:
    model = live_folder("OVERSPILL_LIVE_VLLM_MODEL")
    bound = share_cores([1, 1], CORES)
    common: dict[str, Any] = {"kv_connector": connector, "kv_folder": str(folder)}
    # Told speeds, by which handing over gains even where nobody else is being answered.
    prefill = server(spec(model, *EAGER, role="prefill", bind=bound[0], speeds=(1e6, 20.0), **common))
    decode = server(spec(model, *EAGER, role="decode", bind=bound[1], speeds=(10.0, 20.0), **common))
    async with Disaggregated(prefill, decode, connector, MonotonicClock()) as source:
        await ready(prefill)
        await until(lambda: isinstance(source.replicas[0], DisaggregatedReplica), PATIENCE_S)
        await ready(source)
        yield source


@pytest.mark.parametrize("connector", ["nixl", "shared-folder"])
async def test_a_prompt_that_is_handed_over_is_answered_with_the_same_text(
    connector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.upstream.disaggregated._PATIENCE_S", PATIENCE_S)  # of a machine that has no time
    numbers = " ".join(str(7919 * number % 9973) for number in range(60))
    request = ask(f"{numbers} Who wrote Hamlet?", 16)
    async with pair(connector, tmp_path) as source:
        (replica,) = source.replicas
        assert isinstance(replica, DisaggregatedReplica)
        handed = await text_of(replica, request)
        assert (replica.handed_over, replica.fell_back) == (1, 0)
        (alone,) = source._pools[0].replicas  # the prefill server answers it by itself
        assert handed == await text_of(alone, request)
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"{replica.info.endpoint}/metrics")).text
        (fetched,) = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", page, re.MULTILINE)
        assert float(fetched) > 100  # tokens whose keys and values came from the other server
