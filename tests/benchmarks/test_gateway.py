"""The gateway benchmark: its engine, its callers, and what is made of their figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from benchmarks.gateway.__main__ import Sample, rows_of, summarise
from benchmarks.gateway.load import STREAM_TOKENS, Load
from benchmarks.gateway.stub import MODEL, Connection, Engine


@asynccontextmanager
async def stub() -> AsyncIterator[int]:
    engine = Engine(0.0)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0.05)  # its connections notice that the callers have gone


async def test_the_stub_engine_speaks_openai() -> None:
    async with stub() as port, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
        assert MODEL in [model.id for model in (await client.models.list()).data]
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3)
        assert whole.choices[0].message.content == " word word end"
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
        assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == " word word word word end"
        assert events[-1].usage.completion_tokens == 5


@pytest.mark.parametrize("streamed", [False, True])
async def test_callers_count_whole_answers(streamed: bool) -> None:
    async with stub() as port:
        load = Load(port, 3, streamed)
        await load.run(0.05)
    assert load.answered >= 3
    assert len(load.first_s) == load.answered
    assert load.failures == []


async def test_a_caller_that_gets_less_than_it_asked_for_fails_the_benchmark() -> None:
    async def short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n{"content":"eh"}')
        await reader.read()
        writer.close()

    server = await asyncio.start_server(short, "127.0.0.1", 0)
    with pytest.raises(SystemExit, match="1 requests failed"):
        await Load(server.sockets[0].getsockname()[1], 1, stream=False).run(0.05)
    server.close()
    await asyncio.sleep(0.05)


def test_what_others_add_is_told_against_the_engine_alone() -> None:
    samples = {}
    for callers in (1, 16, 64):
        for mode in ("json", "stream"):
            samples["direct", mode, callers] = [Sample(1000, 1.0, 0.1, [0.001] * 1000)]
            samples["overspill", mode, callers] = [Sample(100 + callers, 1.0, 0.1, [0.002] * 100)]
            samples["overspill-compiled", mode, callers] = [Sample(200 + callers, 1.0, 0.1, [0.0015] * 100)]
            samples["old", mode, callers] = [Sample(50, 1.0, 0.1, [0.004] * 50)]
            samples["litellm", mode, callers] = [Sample(10, 1.0, 0.5, [0.02] * 10)]
    samples["overspill", "paced", 64] = [Sample(164, 1.0, 0.2, [0.002] * 100)]
    rows = rows_of(samples)
    told = summarise(rows, "old")
    assert told["json_times_old_at_64"] == pytest.approx(164 / 50, abs=0.01)
    assert told["stream_least_times_litellm"] == pytest.approx(10.1, abs=0.01)
    assert told["json_added_p50_ms_at_1"] == pytest.approx(1.0)
    assert told["compiled_json_added_p50_ms_at_1"] == pytest.approx(0.5)
    assert told["compiled_json_least_times_litellm"] == pytest.approx(20.1, abs=0.01)
    assert told["json_least_rise"] == pytest.approx(116 / 101, abs=0.01)
    paced_us = (0.2 / 164 - 0.1 / 164) * 1e6 / (STREAM_TOKENS - 1)
    assert told["paced_cpu_us_a_token_at_64"] == pytest.approx(paced_us, abs=0.1)
    assert {row["mode"] for row in rows} == {"json", "stream", "paced"}


def test_the_echo_server_answers_as_the_engine_does() -> None:
    from starlette.testclient import TestClient

    from benchmarks.gateway.echo import app

    body = {"model": MODEL, "messages": [], "max_tokens": 2}
    with TestClient(app) as client:
        whole: httpx.Response = client.post("/v1/chat/completions", json={**body, "stream": False})
        assert whole.json()["choices"][0]["message"]["content"] == " word end"
        assert client.post("/v1/chat/completions", json={**body, "stream": True}).text.count("data: ") == 5
