"""What a tier refuses for want of capacity counts for no minute of the tenant that asked; what fails does."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from router.base.clock import MonotonicClock
from router.tenants.keys_edit import NewKey, add_key
from router.tenants.tenancy import KeySources, Tenancy
from tests.support.gateway_fakes import FAMILY, client_of, gateway_deps


def chat(content: str, **fields) -> dict:
    return {"model": FAMILY, "messages": [{"role": "user", "content": content}], **fields}


async def asked(folder: Path, *bodies: dict) -> list[httpx.Response]:
    """Send one after the other as a tenant that may send three a minute."""
    path = folder / "keys"
    key = add_key(path, NewKey("acme"), {"requests_per_minute": 3, "tokens_per_minute": 100_000})
    clock = StandingClock()
    tenancy = Tenancy(KeySources(path=path).directory(), clock)
    async with client_of(gateway_deps(tenancy=tenancy), key) as client:
        return [await client.post("/v1/chat/completions", json=body) for body in bodies]


class StandingClock(MonotonicClock):
    """No minute passes, however slow the machine is."""

    def now_s(self) -> float:
        return 1000.0


@pytest.mark.parametrize("why", ["unavailable", "shed", "deadline"])
@pytest.mark.parametrize("stream", [False, True])
async def test_want_of_capacity_takes_nothing_of_a_minute(tmp_path: Path, why: str, stream: bool) -> None:
    refused = [chat(f"refuse {why}", stream=stream, seed=n) for n in range(5)]
    replies = await asked(tmp_path, *refused, chat("say hi"))
    assert {reply.status_code for reply in replies[:5]} <= {429, 503}
    assert {reply.json()["error"]["code"] for reply in replies[:5]}.isdisjoint({"rate_limit_exceeded"})
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["3"] * 5 + ["2"]


async def test_choices_that_are_all_refused_give_one_back(tmp_path: Path) -> None:
    replies = await asked(tmp_path, chat("say hi"), chat("refuse unavailable", n=2), chat("say hi"), chat("say hi"))
    assert [reply.status_code for reply in replies] == [200, 503, 200, 200]


async def test_what_fails_or_asks_for_nonsense_counts(tmp_path: Path) -> None:
    replies = await asked(tmp_path, chat("break-first"), {"model": FAMILY}, chat("crash"), chat("say hi"))
    assert [reply.status_code for reply in replies] == [502, 400, 500, 429]
