"""A real Triton behind the router: two of them, one killed in mid-stream; models that load, fail, and are given up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from examples.demo.processes import Child, overspill
from router.base.clock import MonotonicClock
from router.base.errors import ReplicaBroken, ReplicaFailed
from router.upstream.servers.foreign import Surroundings
from router.upstream.settings import BackendSettings
from router.upstream.source import ReplicaSource, SourceHooks
from router.upstream.sources import backend_sources
from router.values.chunk import FinishReason
from router.values.prompt import TextPrompt
from router.values.replica import Replica
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from tests.support.live_triton import TritonServer, triton_server
from tests.support.ports import unused_port
from tests.support.waiting import until

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]

CLOCK = MonotonicClock()
WORDS = 60
PROMPT = "one two three"
ANSWER = "".join(f" w{number}" for number in range(3, 3 + WORDS))


def edge_config(folder: Path, port: int, *servers: TritonServer) -> Path:
    urls = ", ".join(f'"{server.url}"' for server in servers)
    path = folder / "edge.toml"
    path.write_text(
        f"""
[agent]
cache_dir = "{folder / "cache"}"
[gateway]
port = {port}
[models]
variants = []
preload = []
[[backends]]
name = "triton"
kind = "kserve"
urls = [{urls}]
poll_interval_s = 0.5
"""
    )
    return path


@contextlib.asynccontextmanager
async def edge(folder: Path, *servers: TritonServer) -> AsyncIterator[httpx.AsyncClient]:
    """A real edge agent in front of Tritons; it is there once both models of each are known."""
    port = unused_port()
    config = edge_config(folder, port, *servers)
    child = Child("edge", overspill("edge", "run", "--config", str(config)), folder / "edge.log")
    child.start()
    try:
        await child.wait_ready(f"http://127.0.0.1:{port}/health/ready", 60.0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60.0) as client:
            await until(lambda: child.log.read_text().count("upstream rungs") >= len(servers), 90.0, every_s=0.2)
            yield client
    finally:
        await child.stop()


def log_of(server: TritonServer) -> str:
    return server.child.log.read_text(errors="replace")


async def test_one_of_two_is_killed_in_mid_stream_and_the_text_is_exact(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    async with triton_server(folders[0]) as one, triton_server(folders[1]) as two, edge(tmp_path, one, two) as client:
        body = {"model": "counting", "prompt": PROMPT, "max_tokens": WORDS, "stream": True, "temperature": 0}
        pieces: list[str] = []
        reasons: list[str] = []
        killed = None
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                pieces.append(choice["text"])
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                if len(pieces) == 10:
                    killed = next(server for server in (one, two) if f"asked: {PROMPT}\n" in log_of(server))
                    killed.kill()
        assert killed is not None
        other = two if killed is one else one
        assert "".join(pieces) == ANSWER
        assert reasons == ["length"]
        went_on = next(line for line in log_of(other).splitlines() if line.startswith(f"asked: {PROMPT} w3"))
        assert ANSWER.startswith(went_on.removeprefix(f"asked: {PROMPT}"))
        again = await client.post("/v1/completions", json={**body, "stream": False, "model": "whole"})
        assert again.json()["choices"][0]["text"] == ANSWER  # the one that is left


@contextlib.asynccontextmanager
async def backend(server: TritonServer) -> AsyncIterator[ReplicaSource]:
    fields = {
        "name": "triton",
        "kind": "kserve",
        "urls": [server.url],
        "poll_interval_s": 0.2,
        "warm_up": False,
        "kserve": {"metrics_url": server.metrics_url},
    }
    settings = msgspec.convert(fields, BackendSettings)
    (source,) = backend_sources([settings], Surroundings(CLOCK, SourceHooks(), lambda _: None), environ={})
    async with source:
        yield source


async def replica_of(source: ReplicaSource, variant: str) -> Replica:
    def found() -> Replica | None:
        return next((r for r in source.replicas if r.info.variant == variant and r.snapshot().available), None)

    return await until(found, 60.0)


def ask(prompt: str, tokens: int = 8) -> InferenceRequest:
    return InferenceRequest(
        request_id="live",
        model="any",
        prompt=TextPrompt(prompt),
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0),
        objective=Objective(),
        prompt_tokens=8,
        accepted_at_s=CLOCK.now_s(),
    )


async def test_what_it_serves_is_read_from_it(tmp_path: Path) -> None:
    async with triton_server(tmp_path) as server, backend(server) as source:
        counting, whole = await replica_of(source, "counting"), await replica_of(source, "whole")
        assert (counting.info.context_tokens, whole.info.context_tokens) == (512, 512)
        assert (counting.snapshot().slots, whole.snapshot().slots) == (2, 8)
        chunks = [chunk async for chunk in counting.generate(ask("one two", 4))]
        assert [chunk.text for chunk in chunks] == [" w2", " w3", " w4", " w5", ""]
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert [chunk.text async for chunk in whole.generate(ask("one two", 4))] == [" w2 w3 w4 w5", ""]

        with pytest.raises(ReplicaFailed, match="it was told to fail"):
            [chunk async for chunk in whole.generate(ask("fails"))]
        got = []
        with pytest.raises(ReplicaBroken, match="it was told to fail"):  # noqa: PT012 - what came before counts
            async for chunk in counting.generate(ask("fails")):
                got.append(chunk.text)  # noqa: PERF401
        assert got == [" w1", " w2", " w3"]

        given_up = counting.generate(ask("given up", 400))
        await anext(given_up)
        await given_up.aclose()
        await until(lambda: "cancelled: given up" in log_of(server), 30.0, every_s=0.1)

        await until(lambda: counting.snapshot().queued == 0, 30.0)
        async with httpx.AsyncClient(trust_env=False, timeout=60.0) as others:  # four for two instances
            url, busy = f"{server.url}/v2/models/counting/generate_stream", {"text_input": "busy", "max_tokens": 60}
            asked = [asyncio.create_task(others.post(url, json=busy)) for _ in range(4)]
            await until(lambda: counting.snapshot().queued == 2, 30.0)
            await asyncio.gather(*asked)
            await until(lambda: counting.snapshot().queued == 0, 30.0)


async def test_a_model_that_loads_is_a_time(tmp_path: Path) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=counting", "--load-model=whole")
    async with (
        triton_server(tmp_path, *flags) as server,
        backend(server) as source,
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60.0) as operator,
    ):
        counting, whole = await replica_of(source, "counting"), await replica_of(source, "whole")
        for _ in range(2):
            assert (await operator.post("/v2/repository/models/counting/unload")).status_code == 200
            await until(lambda: not counting.snapshot().available)
            assert "counting is not loaded there" in counting.snapshot().why
            assert whole.snapshot().available
            loading = operator.build_request("POST", "/v2/repository/models/counting/load")
            sent = asyncio.create_task(operator.send(loading))
            seen = await until(lambda: counting.snapshot() if counting.snapshot().back_in_s else None, 20.0)
            assert seen.why == "counting is being loaded"
            assert (await sent).status_code == 200
            assert await replica_of(source, "counting") is counting
