"""Batches of tenants: theirs alone, within their budget, beside their limits a minute, no longer than their keys."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path

import openai
import pytest

from router.base.clock import MonotonicClock
from router.tenants.keys_file import NOBODY
from router.tenants.tenancy import KeySources, Tenancy
from router.values.chunk import FinishReason, TokenChunk
from router.values.request import InferenceRequest
from tests.support.job_tier import Echo, ended, job_tier, line, lines_of, submit
from tests.support.waiting import until

KEY = "k" * 24
LINES = [line(f"id-{number}", f"word {number}") for number in range(12)]


def _tenancy(tmp_path: Path, limits: str) -> Tenancy:
    path = tmp_path / "keys"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text(f"tenant search {limits}\nkey search sha256:{digest}\n")
    return Tenancy(KeySources((), path).directory(), MonotonicClock())


async def test_lines_take_nothing_of_what_a_tenant_may_send_a_minute(tmp_path: Path) -> None:
    tenancy = _tenancy(tmp_path, "requests_per_minute=3 tokens_per_minute=2000 concurrency=1")
    async with job_tier(tmp_path / "jobs", tenancy=tenancy) as (tier, _), tier.client(KEY) as client:
        done = await ended(client, (await submit(client, LINES)).id)
        assert done.request_counts.completed == 12
        for _ in range(3):
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        rows = await tenancy.ledger.report("0001-01-01", "9999-12-31")
        assert sum(row.counts.requests for row in rows) == 15  # lines are usage all the same


class Begun(Echo):
    """It waits behind its first word instead."""

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        self.running += 1
        try:
            yield TokenChunk("begun")
            await self.gate.wait()
            yield TokenChunk("", 0, finish_reason=FinishReason.STOP)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


@pytest.mark.parametrize("n", [1, 2])
async def test_what_lines_had_of_an_answer_when_they_were_stopped_is_no_usage(tmp_path: Path, n: int) -> None:
    tenancy, replica = _tenancy(tmp_path, "priority=0"), Begun(slots=4)
    lines = [line(f"id-{number}", f"word {number}", n=n) for number in range(4)]
    async with job_tier(tmp_path / "jobs", replica, tenancy=tenancy) as (tier, _), tier.client(KEY) as client:
        replica.gate.clear()
        batch = await submit(client, lines)
        await until(lambda: replica.running == 4)
        online = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "online"}])
        )
        await until(lambda: replica.cancelled)
        replica.gate.set()
        used = (await online).usage
        done = await ended(client, batch.id)
        assert done.request_counts.completed == 4
        assert tier.jobs.runner.stopped
        told = [answer["response"]["body"]["usage"] for answer in await lines_of(client, done.output_file_id)]
        counts = [row.counts for row in await tenancy.ledger.report("0001-01-01", "9999-12-31")]
        assert used is not None
        assert sum(row.requests for row in counts) == 5
        assert sum(row.completion_tokens for row in counts) == used.completion_tokens + sum(
            usage["completion_tokens"] for usage in told
        )
        assert sum(row.prompt_tokens for row in counts) == used.prompt_tokens + sum(
            usage["prompt_tokens"] for usage in told
        )


async def test_lines_of_a_tenant_without_keys_wait(tmp_path: Path) -> None:
    tenancy = _tenancy(tmp_path, "priority=0")
    path, replica = tmp_path / "keys", Echo(slots=1)
    async with job_tier(tmp_path / "jobs", replica, tenancy=tenancy) as (tier, _), tier.client(KEY) as client:
        replica.gate.clear()
        batch = await submit(client, LINES)
        await until(lambda: replica.running)
        kept = path.read_text()
        path.write_text(NOBODY)
        await tenancy.directory.refresh(path)
        replica.gate.set()
        await until(lambda: tier.jobs.runner.written == 1)
        await until(lambda: not tier.jobs.runner.running)
        assert len(replica.asked) == 1
        with contextlib.suppress(openai.AuthenticationError):
            await client.batches.retrieve(batch.id)
            raise AssertionError("a key that is gone opened the tier")
        path.write_text(kept)
        await tenancy.directory.refresh(path)
        assert (await client.batches.retrieve(batch.id)).request_counts.completed == 1
