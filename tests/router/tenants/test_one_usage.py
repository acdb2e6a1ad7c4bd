"""What a reply tells of its tokens is what its tenant's ledger and limits count, whatever was asked for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.choices import total
from router.tenants.keys_edit import NewKey, add_key
from router.tenants.quota import Quota
from router.tenants.used import Counts
from router.values.usage import SharedPrompt, Usage
from tests.router.dispatch.test_calls import Encoder
from tests.router.tenants.test_tenancy import CHAT, House
from tests.support.gateway_fakes import FAMILY
from tests.support.waiting import until

SAID = {"messages": [{"role": "user", "content": "recite now"}]}
PROMPTS = {"prompt": ["recite now", "recite it once more"]}
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "one": (CHAT, SAID),
    "cut": (CHAT, {**SAID, "max_tokens": 3}),
    "stopped": (CHAT, {**SAID, "stop": ["w3"]}),
    "choices": (CHAT, {**SAID, "n": 3}),
    "choices that are cut": (CHAT, {**SAID, "n": 2, "max_tokens": 4}),
    "prompts": (COMPLETIONS, PROMPTS),
    "choices of prompts": (COMPLETIONS, {**PROMPTS, "n": 3}),
    "echo": (COMPLETIONS, {"prompt": "recite now", "echo": True, "max_tokens": 2}),
    "the prompt alone": (COMPLETIONS, {"prompt": "recite now", "echo": True, "max_tokens": 0}),
    "response": (RESPONSES, {"input": "recite now"}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("asked", ASKED)
async def test_the_ledger_counts_what_the_reply_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, stream: bool
) -> None:
    settled: list[Usage] = []
    monkeypatch.setattr(Quota, "settle", lambda _self, _now_s, _reserved, used: settled.append(used))
    path, body = ASKED[asked]
    key = add_key(tmp_path / "keys", NewKey("acme"), {"tokens_per_minute": 10_000})
    async with House(tmp_path / "keys").open() as house:
        options = {"stream_options": {"include_usage": True}} if stream and path != RESPONSES else {}
        reply = await house.http.post(
            path,
            json={"model": FAMILY, "stream": stream, **options, **body},
            headers={"authorization": f"Bearer {key}"},
        )
        assert reply.status_code == 200, reply.text
        told = _usage(reply.text, stream=stream)
        quota = house.tenancy.quotas["acme"]
        await until(lambda: quota.running == 0)
        counts = list(house.tenancy.ledger.totals.values())
        assert sum(count.prompt_tokens for count in counts) == told[0]
        assert sum(count.completion_tokens for count in counts) == told[1]
        assert sum(used.total_tokens for used in settled) == sum(told)
        assert sum(count.requests for count in counts) == len(
            body.get("prompt", "") if asked.endswith("prompts") else "1"
        )


async def test_an_answer_that_is_no_text_has_no_tokens(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys", NewKey("acme"), {})
    async with House(tmp_path / "keys", beside=[Encoder("tiny-fp32")]).open() as house:
        body = {"model": "tiny-fp32", "input": "three tokens here"}
        reply = await house.http.post("/v1/embeddings", json=body, headers={"authorization": f"Bearer {key}"})
        assert reply.json()["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
        await until(lambda: house.tenancy.quotas["acme"].running == 0)
        assert list(house.tenancy.ledger.totals.values()) == [Counts(1, 3, 0, 0)]


async def test_choices_are_one_request_of_a_minute_and_of_those_at_once(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys", NewKey("acme"), {"requests_per_minute": 1, "concurrency": 1})
    async with House(tmp_path / "keys").open() as house:
        reply = await house.http.post(
            CHAT, json={"model": FAMILY, "n": 3, **SAID}, headers={"authorization": f"Bearer {key}"}
        )
        assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["stop"] * 3
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
        quota = house.tenancy.quotas["acme"]
        await until(lambda: quota.running == 0)
        assert list(quota.refused.values()) == []


async def test_a_prompt_is_set_aside_once_for_its_choices(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys", NewKey("acme"), {"tokens_per_minute": 100})
    async with House(tmp_path / "keys").open() as house:
        house.reciter.pause = asyncio.Event()
        body = {"model": FAMILY, "messages": [{"role": "user", "content": "recite " * 29}], "n": 5, "max_tokens": 10}
        asking = asyncio.create_task(house.http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"}))
        await until(lambda: (len(house.reciter.requests), house.dispatcher.waiting) == (4, 1))
        house.reciter.pause.set()
        reply = await asking
        assert reply.status_code == 200, "five prompts of thirty would be more than the hundred of a minute"
        assert reply.json()["usage"]["total_tokens"] == 30 + 5 * 10


def _usage(text: str, *, stream: bool) -> tuple[int, int]:
    if stream:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        found = next(e["usage"] for e in (event.get("response", event) for event in reversed(events)) if e.get("usage"))
    else:
        found = json.loads(text)["usage"]
    if "input_tokens" in found:
        return found["input_tokens"], found["output_tokens"]
    return found["prompt_tokens"], found["completion_tokens"]


_USAGES = st.builds(Usage, st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 9))


@given(usages=st.lists(_USAGES, min_size=3, max_size=3), order=st.permutations(range(3)))
def test_the_order_in_which_answers_end_changes_nothing(usages: list[Usage], order: list[int]) -> None:
    prompt = SharedPrompt()
    parts = [prompt.part(usages[at], first=at == 0) for at in order]
    told = total(usages, 3)
    assert sum(part.prompt_tokens for part in parts) == told.prompt_tokens
    assert sum(part.completion_tokens for part in parts) == told.completion_tokens
    assert [part.cached_tokens for part in parts if part.cached_tokens is not None] in ([], [told.cached_tokens])
