"""`overspill cloud jobs` against a running tier."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from cloud_tier.cli import app
from router.base.clock import MonotonicClock
from router.base.errors import ConfigError
from router.tenants.keys_file import digest_of
from router.tenants.tenancy import KeySources, Tenancy
from tests.support.job_tier import Echo, ended, job_tier, line, lines_of, submit
from tests.support.waiting import until

KEYS = {"one": "k" * 24, "two": "l" * 24, "ops": "o" * 24}


def _tenancy(tmp_path: Path) -> Tenancy:
    path = tmp_path / "keys"
    roles = {"ops": " role=operator"}
    lines = [f"key {name} sha256:{digest_of(key.encode())}{roles.get(name, '')}\n" for name, key in KEYS.items()]
    path.write_text("".join(lines))
    return Tenancy(KeySources((), path).directory(), MonotonicClock())


async def _run(monkeypatch: pytest.MonkeyPatch, who: str, *arguments: str) -> str:
    monkeypatch.setenv("OVERSPILL_API_KEY", KEYS.get(who, ""))
    result = await asyncio.to_thread(CliRunner().invoke, app, ["jobs", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


async def test_an_operator_sees_and_cancels_everybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Echo(slots=1)
    async with (
        job_tier(tmp_path / "jobs", replica, tenancy=_tenancy(tmp_path)) as (tier, _),
        tier.client(KEYS["one"]) as one,
        tier.client(KEYS["two"]) as two,
        tier.client(KEYS["ops"]) as ops,
    ):
        done = await ended(one, (await submit(one, [line("a", "x")])).id)
        replica.gate.clear()
        mine = await submit(one, [line(f"{n}", "x") for n in range(3)])
        theirs = await submit(two, [line("a", "x")])
        await until(lambda: tier.jobs.runner.batches["in_progress"] == 2)
        found = json.loads(await _run(monkeypatch, "ops", "list", "--url", tier.url, "--json"))
        assert [(batch["id"], batch["tenant"]) for batch in found] == [(theirs.id, "two"), (mine.id, "one")]
        assert mine.id not in await _run(monkeypatch, "two", "list", "--url", tier.url)
        told = await _run(monkeypatch, "ops", "list", "--url", tier.url, "--ended")
        assert done.id in told
        assert "0 of 3 answered, 0 failed  one" in told
        with pytest.raises(ConfigError, match="there is no batch"):
            await _run(monkeypatch, "two", "cancel", mine.id, "--url", tier.url)
        assert f"{mine.id} is cancelling" in await _run(monkeypatch, "ops", "cancel", mine.id, "--url", tier.url)
        assert (await ended(one, mine.id)).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            await lines_of(ops, done.output_file_id)
        replica.gate.set()


async def test_status_tells_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Echo(slots=1)
    async with job_tier(tmp_path, replica) as (tier, client):
        replica.gate.clear()
        await submit(client, [line("a", "x")])
        await until(lambda: replica.running)
        monkeypatch.setenv("COLUMNS", "200")
        result = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--url", tier.url])
        assert "batches: 1 in progress; 1 lines running" in result.output
        replica.gate.set()
