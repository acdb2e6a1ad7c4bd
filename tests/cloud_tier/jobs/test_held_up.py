"""Lines on a real engine that online requests come between: every reply is the one that nobody had come between."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cloud_tier.engine.torch_engine import TorchEngine
from cloud_tier.replicas import EngineReplica
from models.text.chat import PromptEncoder
from tests.support import engine_models
from tests.support.gateway_fakes import replica_info
from tests.support.job_tier import JobTier, as_file, ended, job_tier, lines_of
from tests.support.slow_client import SlowClient, narrow
from tests.support.waiting import until

pytestmark = pytest.mark.process

LONG = {"model": "tiny", "prompt": "once", "max_tokens": 300, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {**LONG, "temperature": 0},
    "seeded": {**LONG, "temperature": 1.0, "seed": 5},
    "penalised": {
        **LONG,
        "temperature": 0.9,
        "seed": 6,
        "top_p": 0.9,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.3,
    },
    "several": {**LONG, "temperature": 1.0, "seed": 7, "n": 3},
    "told": {**LONG, "temperature": 0.8, "seed": 8, "logprobs": 2},
    "matched": {**LONG, "temperature": 1.0, "seed": 9, "ignore_eos": False, "guided_regex": "([a-z]{3} ){40}"},
}


@contextlib.asynccontextmanager
async def _tier(folder: Path) -> AsyncIterator[tuple[JobTier, openai.AsyncOpenAI]]:
    weights = engine_models.save_with_tokenizer(folder)
    config = engine_models.small(weights, kv_cache_tokens=8192, max_context_tokens=400, max_running=16, token_budget=64)
    engine = TorchEngine(config)
    await engine.start()
    try:
        info = replica_info("tiny-fp32", 0, context_tokens=400, holds_up=True, leaves_steps=True)
        replica = EngineReplica(engine, PromptEncoder.load(weights), info)
        async with job_tier(folder / "jobs", replica) as found:
            yield found
    finally:
        await engine.stop()


def _told(reply: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same: all but names and times. Numbers of one batch differ from those of another in a digit."""
    usage = {name: number for name, number in reply["usage"].items() if isinstance(number, int)}
    logprobs = [choice["logprobs"]["tokens"] for choice in reply["choices"] if choice.get("logprobs")]
    return [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]], usage, logprobs


async def test_every_reply_is_the_one_that_nobody_had_come_between(tmp_path: Path) -> None:
    async with _tier(tmp_path) as (tier, client):

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            reply = await client.post("/completions", body=body, cast_to=dict[str, Any])
            assert isinstance(reply, dict)
            return reply

        expected = {name: _told(await ask(body)) for name, body in BODIES.items()}
        said = expected["greedy"][0][0][0]
        bodies = {**BODIES, "stopped": {**BODIES["greedy"], "stop": [said[150:158]]}}
        expected["stopped"] = _told(await ask(bodies["stopped"]))
        assert expected["stopped"][0][0][1] == "stop"
        lines = [
            {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
            for name, body in bodies.items()
        ]
        file = await client.files.create(file=("lines.jsonl", as_file(lines)), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        await until(lambda: tier.jobs.runner.running)
        came = 0
        while (await client.batches.retrieve(batch.id)).status not in {"completed", "failed", "expired"}:
            reply = await ask({**LONG, "prompt": f"online {came}", "max_tokens": 4, "temperature": 0})
            assert reply["usage"]["completion_tokens"] == 4
            came += 1
        done = await ended(client, batch.id)
        runner = tier.jobs.runner
        assert runner.paused > 0
        assert runner.stopped == 0
        answers = await lines_of(client, done.output_file_id)
        found = {answer["custom_id"]: _told(answer["response"]["body"]) for answer in answers}
        assert json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)


async def test_a_client_that_reads_nothing_of_a_finished_answer_holds_no_line_up(tmp_path: Path) -> None:
    async with _tier(tmp_path) as (tier, client):
        narrow(tier._socket)
        asked = {**LONG, "temperature": 0, "stream": True, "n": 8, "stream_options": {"include_usage": True}}
        async with SlowClient(tier.url, "/v1/completions", asked) as slow:
            registry = tier.telemetry.registry
            await until(lambda: registry.get_sample_value("overspill_gateway_requests_in_flight") == 8.0)
            lines = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODIES["greedy"]}]
            file = await client.files.create(file=("lines.jsonl", as_file(lines)), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            assert (await ended(client, batch.id)).request_counts.completed == 1
            assert registry.get_sample_value("overspill_gateway_requests_in_flight") == 8.0, "nothing was read so far"
            received = await slow.read()
        assert received.count(b'"finish_reason":"length"') == 8
        assert b'"completion_tokens":2400' in received
        assert b"data: [DONE]" in received
