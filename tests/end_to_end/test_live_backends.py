"""The edge in front of real servers of other makers, each killed as by a power cut while it answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from examples.demo.processes import Child, overspill
from examples.demo.traffic import Ask, Reply, send
from tests.support.live_servers import MODEL, LiveServer, llama_server, vllm_server
from tests.support.ports import unused_port
from tests.support.waiting import until_answered

pytestmark = [pytest.mark.live, pytest.mark.real_model, pytest.mark.timeout(1500)]

STORY = "Write a long story about a lighthouse keeper and the sea."
TOKENS = 72
CUT_CHARS = 60  # of an answer of some 300
PATIENT = {"x-overspill-ttft-slo-ms": "60000"}

EDGE_TOML = """\
[agent]
log_format = "json"

[gateway]
port = {port}

[models]
variants = []
preload = []

[router]
ttft_slo_ms = 60000.0
max_queue = 200
"""

BACKEND_TOML = """
[[backends]]
name = "{name}"
kind = "{kind}"
urls = ["{url}"]
poll_interval_s = 0.5
local = {local}
"""

MODEL_TOML = """
[[backends.models]]
served = "smollm2-135m"
variant = "smollm2-135m-{name}"
family = "smollm2-135m"
quality = {quality}
{slots}
"""


@dataclass(frozen=True)
class Behind:
    """A server behind the edge."""

    name: str
    server: LiveServer
    quality: float = 1.0
    local: bool = False
    slots: int = 0

    @property
    def toml(self) -> str:
        kind = "overspill" if self.name == "ours" else "openai"
        text = BACKEND_TOML.format(name=self.name, kind=kind, url=self.server.url, local=str(self.local).lower())
        return (
            text
            if kind == "overspill"
            else text
            + MODEL_TOML.format(
                name=self.name, quality=self.quality, slots=f"slots = {self.slots}" if self.slots else ""
            )
        )

    @property
    def prefix(self) -> str:
        return f"{self.name}/"


class Edge:
    """A real edge agent without models of its own, in front of some servers."""

    def __init__(self, folder: Path, *behind: Behind) -> None:
        self.behind = {one.name: one for one in behind}
        port = unused_port()
        self.url = f"http://127.0.0.1:{port}"
        config = folder / "edge.toml"
        config.write_text(EDGE_TOML.format(port=port) + "".join(one.toml for one in behind))
        self.child = Child("the edge", overspill("edge", "run", "--config", str(config)), folder / "edge.log")
        self.http = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=400)
        self.sdk = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=400)

    async def __aenter__(self) -> Edge:
        self.child.start()
        await self.child.wait_ready(f"{self.url}/health/live", 30)
        await until_answered(self.all_serve, 300, every_s=0.2)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()
        await self.sdk.close()
        await self.child.stop()

    async def all_serve(self) -> bool:
        """Whether each of its servers is a candidate."""
        with contextlib.suppress(httpx.HTTPError):
            await send(self.sdk, Ask("Hi.", max_tokens=1, headers={"x-request-id": "look", **PATIENT}))
            rows = (await self.decision("look"))["candidates"]
            free = [row["replica"] for row in rows if "rejected" not in row or row["rejected"] is None]
            return all(any(name.startswith(one.prefix) for name in free) for one in self.behind.values())
        return False

    async def decision(self, request_id: str) -> dict[str, Any]:
        reply = await self.http.get(f"/v1/decisions/{request_id}")
        found: dict[str, Any] = reply.raise_for_status().json()
        return found

    async def cut(self, first: Behind, request_id: str) -> tuple[Reply, dict[str, Any]]:
        """Ask, and kill the server that answers in mid-stream; return the reply and its record."""

        def kill(reply: Reply) -> None:
            if len(reply.text) > CUT_CHARS and first.server.child.running:
                first.server.kill()

        ask = Ask(STORY, max_tokens=TOKENS, full_length=True, headers={"x-request-id": request_id, **PATIENT})
        reply = await asyncio.wait_for(send(self.sdk, ask, kill), 400)
        return reply, await self.decision(request_id)


async def says(behind: Behind, so_far: str = "", tokens: int = TOKENS) -> str:
    """What a server itself says to the story, or how it goes on with it."""
    messages = [{"role": "user", "content": STORY}]
    body: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if so_far:
        messages.append({"role": "assistant", "content": so_far})
        if behind.name != "llama":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    async with httpx.AsyncClient(base_url=behind.server.url, trust_env=False, timeout=400) as client:
        reply = await client.post("/v1/chat/completions", json={**body, "messages": messages})
    text: str = reply.raise_for_status().json()["choices"][0]["message"]["content"]
    return text.removeprefix(so_far)  # llama.cpp repeats it, where it does not stream


def seam(record: dict[str, Any], first: Behind, second: Behind) -> tuple[int, int]:
    """Return the characters and tokens that came before the answer broke off."""
    events = record["events"]
    assert [event["replica"].split("/")[0] for event in events if event["event"] == "sent"] == [first.name, second.name]
    broke = next(event for event in events if event["event"] == "failover")
    return broke["emitted_chars"], broke["emitted_tokens"]


def cloud_server(folder: Path) -> LiveServer:
    """A cloud tier of ours."""
    port = unused_port()
    argv = overspill("cloud", "serve", "--model", f"{MODEL}-fp32", "--port", str(port))
    return LiveServer("ours", argv, port, folder / "ours.log", ready_path="/health/ready", patience_s=420)


MAKERS = {"vllm": vllm_server, "ours": cloud_server}


@contextlib.asynccontextmanager
async def running(names: tuple[str, ...], folder: Path, models_root: Path) -> AsyncIterator[list[LiveServer]]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [llama_server(models_root, folder) if n == "llama" else MAKERS[n](folder) for n in names]
        yield list(await asyncio.gather(*map(stack.enter_async_context, servers)))


@pytest.mark.parametrize(("first", "second"), [("vllm", "llama"), ("llama", "vllm"), ("ours", "llama")])
async def test_a_server_killed_in_mid_stream_is_finished_by_the_other(
    first: str, second: str, tmp_path: Path, models_root: Path
) -> None:
    async with running((first, second), tmp_path, models_root) as (one, other):
        begins, ends = Behind(first, one), Behind(second, other, quality=0.8)
        async with Edge(tmp_path, begins, ends) as edge:
            whole = await says(begins)
            reply, record = await edge.cut(begins, "cut")
            assert reply.served, reply.error
            chars, tokens = seam(record, begins, ends)
            assert chars > CUT_CHARS
            assert reply.text[:chars] == whole[:chars], "nothing lost or doubled before the seam"
            assert reply.text[chars:] == await says(ends, reply.text[:chars], TOKENS - tokens), "nor after it"
            assert reply.completion_tokens == TOKENS
            assert reply.finish == "length"
            begins.server.start()
            await begins.server.ready()
            await until_answered(edge.all_serve, 300, every_s=0.5)


async def test_of_two_servers_at_once_each_may_be_killed(tmp_path: Path, models_root: Path) -> None:
    async with running(("vllm", "llama"), tmp_path, models_root) as (vllm, llama):
        both = Behind("vllm", vllm, slots=4), Behind("llama", llama, slots=4)
        async with Edge(tmp_path, *both) as edge:
            for victim, survivor in (both, both[::-1]):
                cut: list[str] = []

                def kill(reply: Reply, victim: Behind = victim, cut: list[str] = cut) -> None:
                    if len(reply.text) > CUT_CHARS and reply.variant.endswith(victim.name) and not cut:
                        cut.append(reply.ask.headers["x-request-id"])
                        victim.server.kill()

                asks = [
                    Ask(
                        f"{STORY} Chapter {n}.",
                        max_tokens=TOKENS,
                        full_length=True,
                        headers={"x-request-id": f"{victim.name}-{n}", **PATIENT},
                    )
                    for n in range(8)
                ]
                replies = await asyncio.wait_for(asyncio.gather(*(send(edge.sdk, ask, kill) for ask in asks)), 400)
                assert cut, [reply.variant for reply in replies]
                for reply in replies:
                    assert reply.served, reply.error
                    assert reply.completion_tokens == TOKENS
                    events = (await edge.decision(reply.ask.headers["x-request-id"]))["events"]
                    ended = [event["replica"] for event in events if event["event"] == "sent"][-1]
                    assert ended.startswith(survivor.prefix) or not any(e["event"] == "failover" for e in events)
                assert (await edge.decision(cut[0]))["events"][-1]["outcome"] == "completed"
                victim.server.start()
                await victim.server.ready()
                await until_answered(edge.all_serve, 300, every_s=0.5)


async def test_llama_cpp_on_the_device_is_a_rung_of_it(tmp_path: Path, models_root: Path) -> None:
    async with running(("vllm", "llama"), tmp_path, models_root) as (vllm, llama):
        far, near = Behind("vllm", vllm), Behind("llama", llama, quality=0.8, local=True)
        async with Edge(tmp_path, far, near) as edge:
            for number in range(3):
                kept = Ask(
                    "Hello.", 8, headers={"x-overspill-locality": "local-only", "x-request-id": f"kept-{number}"}
                )
                reply = await send(edge.sdk, kept)
                assert (reply.served, reply.tier, reply.variant) == (True, "edge", "smollm2-135m-llama")
            rows = {row["replica"]: row for row in (await edge.decision("kept-2"))["candidates"]}
            assert rows["vllm/smollm2-135m-vllm"]["rejected"] == "locality"
            away = await send(edge.sdk, Ask("Hello.", 8, headers={"x-overspill-locality": "cloud-only"}))
            assert (away.tier, away.variant) == ("cloud", "smollm2-135m-vllm")
            near.server.kill()
            last = Ask("Hello.", 8, headers={"x-overspill-locality": "local-only", "x-request-id": "gone"})
            gone = await send(edge.sdk, last)
            assert gone.refused_properly
            assert "unreachable" in json.dumps(await edge.decision("gone")) or "refused" in gone.error
