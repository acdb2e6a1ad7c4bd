"""Batches of tenants: theirs alone, within their budget, beside their limits a minute, no longer than their keys."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import openai
import pytest

from router.base.clock import MonotonicClock
from router.tenants.keys_file import NOBODY
from router.tenants.tenancy import KeySources, Tenancy
from tests.support.job_tier import Echo, ended, job_tier, line, submit
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
