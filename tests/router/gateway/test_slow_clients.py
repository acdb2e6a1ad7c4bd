"""Real clients that read slowly, on real sockets: what they were answered waits for them, and nobody else does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from router.dispatch.dispatcher import Dispatcher
from router.values.chunk import FinishReason, TokenChunk
from router.values.request import InferenceRequest
from tests.support.gateway_fakes import prompt_text, replica_info
from tests.support.job_tier import Echo, JobTier, ended, job_tier, line, submit
from tests.support.slow_client import SlowClient, narrow
from tests.support.tiers import Tier, linked
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
WORDS = 10_000  # more than its sockets hold
WORD = "word "


class Writer(Echo):
    """Writes a long answer to `long`; it is done in a moment, however slowly that is read."""

    def __init__(self, slots: int = 1) -> None:
        super().__init__(replica_info("tiny-fp32", 0, context_tokens=10**6), slots=slots)
        self.written = 0

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        if "long" not in prompt_text(request.prompt):
            async for chunk in super().generate(request):
                yield chunk
            return
        self.running += 1
        try:
            for index in range(WORDS):
                if index % 10 == 0:
                    await asyncio.sleep(0)
                yield TokenChunk(WORD)
            self.written += 1
            yield TokenChunk("", 0, finish_reason=FinishReason.STOP)
        finally:
            self.running -= 1


def slow_client(tier: Tier | JobTier, **body: object) -> SlowClient:
    """Ask for what is long, by a socket that holds little of it."""
    narrow(tier._socket)
    return SlowClient(tier.url, CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "long"}], **body})


def words_in(received: bytes) -> tuple[int, dict[str, int]]:
    """Count the words of an answer, streamed or not; return them and the usage that it tells."""
    events = [json.loads(part[6:]) for part in unchunked(received).split(b"\n\n") if part.startswith(b"data: {")]
    if not events:
        whole = json.loads(received.partition(b"\r\n\r\n")[2])
        return whole["choices"][0]["message"]["content"].count(WORD), whole["usage"]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return text.count(WORD), next(event["usage"] for event in events if event.get("usage"))


def unchunked(received: bytes) -> bytes:
    """Return the body of a reply in chunks."""
    body, found = received.partition(b"\r\n\r\n")[2], bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        with contextlib.suppress(ValueError):
            found += body[: int(size, 16)]
            body = body[int(size, 16) + 2 :]
    return bytes(found)


def is_free(dispatcher: Dispatcher) -> bool:
    """Nothing that was sent to a replica has not ended."""
    return len(dispatcher._signals.in_flight) == 0


def inside(tier: Tier | JobTier) -> float | None:
    """Requests inside the gateway."""
    return tier.telemetry.registry.get_sample_value("overspill_gateway_requests_in_flight")


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("body", [STREAM, {}, {**STREAM, "n": 2}], ids=["stream", "json", "two choices"])
async def test_who_reads_nothing_keeps_no_slot_and_gets_all_once_it_reads(body: dict) -> None:
    writer, answers = Writer(), int(body.get("n", 1))
    async with Tier("edge", [writer]) as tier, httpx.AsyncClient(base_url=tier.url, timeout=60) as others:
        async with slow_client(tier, **body) as slow:
            await until(lambda: writer.written == answers and is_free(tier.dispatcher))
            await until(lambda: inside(tier) == (answers if "stream" in body else 0.0))
            short = {"model": "tiny", "messages": [{"role": "user", "content": "short"}]}
            reply = await others.post(CHAT, json=short)
            assert reply.json()["choices"][0]["message"]["content"] == "short"
            assert is_free(tier.dispatcher)
            words, usage = words_in(await slow.read())
        assert (words, usage["completion_tokens"]) == (answers * WORDS, answers * WORDS)
        await until(lambda: inside(tier) == 0.0)
        record = tier.dispatcher.explain("slow").to_json()
        assert (record["outcome"], record["tokens"]) == ("completed", WORDS)


async def test_who_leaves_with_text_unread_is_gone() -> None:
    writer = Writer()
    async with Tier("edge", [writer]) as tier:
        async with slow_client(tier, **STREAM):
            await until(lambda: writer.written and is_free(tier.dispatcher))
            assert inside(tier) == 1.0
        await until(lambda: inside(tier) == 0.0)
        record = tier.dispatcher.explain("slow").to_json()
        assert (record["outcome"], record["tokens"]) == ("cancelled", WORDS)


async def test_lines_of_batches_wait_for_no_slow_client(tmp_path: Path) -> None:
    writer = Writer()
    async with job_tier(tmp_path, writer) as (tier, client), slow_client(tier, **STREAM) as slow:
        await until(lambda: writer.written)
        batch = await submit(client, [line(str(number), f"line {number}") for number in range(3)])
        assert (await ended(client, batch.id)).request_counts.completed == 3
        assert inside(tier) == 1.0, "it has not read yet"
        assert words_in(await slow.read())[0] == WORDS


async def test_a_slow_client_of_a_device_keeps_no_slot_above_it() -> None:
    writer = Writer(slots=4)
    async with Tier("cloud", [writer]) as cloud, Tier("edge", []) as edge, linked(edge, cloud, []):
        async with slow_client(edge, **STREAM) as slow:
            await until(lambda: writer.written and is_free(edge.dispatcher) and is_free(cloud.dispatcher))
            assert (inside(edge), inside(cloud)) == (1.0, 0.0)
            words, usage = words_in(await slow.read())
        assert (words, usage["completion_tokens"]) == (WORDS, WORDS)
