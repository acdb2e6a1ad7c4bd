"""What an application does with the real `openai` SDK, on both tiers with the real model."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from examples.demo.stack import API_KEY, Stack
from tests.support.waiting import until_true

pytestmark = pytest.mark.real_model

MODEL = "smollm2-135m"
FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat_knows_the_capital_of_france(client: openai.OpenAI, tier: str) -> None:
    def ask() -> Any:
        asked = client.chat.completions.with_raw_response
        raw = asked.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=32)
        return raw if raw.headers["x-overspill-tier"] == tier else None

    raw = until_true(ask)  # a device that has just stood still is slow for a while, and sends it to the cloud
    reply = raw.parse()
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert raw.headers["x-overspill-degraded"] == "false"


def test_completions_continue_raw_text(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8)
    assert "Paris" in reply.choices[0].text
    assert reply.usage.completion_tokens <= 8


def test_streaming_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=FRANCE,
            temperature=0,
            max_completion_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_the_next_turn_of_a_chat_finds_what_the_last_one_left(client: openai.OpenAI) -> None:
    rules = "Answer in one short sentence, in plain words, and say nothing that you are not asked for. " * 3
    chat: list[Any] = [{"role": "system", "content": rules}, *FRANCE]
    here = {"x-overspill-locality": "local-only"}
    first = client.chat.completions.create(model=MODEL, messages=chat, max_tokens=16, extra_headers=here)
    chat += [{"role": "assistant", "content": first.choices[0].message.content}]
    chat += [{"role": "user", "content": "And of Spain?"}]
    second = client.chat.completions.create(model=first.model, messages=chat, max_tokens=16, extra_headers=here)
    least = first.usage.prompt_tokens // 16 * 16  # the cloud shares whole blocks of 16
    assert least <= second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    apart = client.chat.completions.create(
        model=first.model,
        messages=chat,
        max_tokens=4,
        extra_headers={**here, "x-overspill-cache-salt": "another"},
    )
    assert apart.usage.prompt_tokens_details.cached_tokens <= 1  # the model's own prefix


def test_stop_strings_end_the_answer_and_are_not_in_it(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=32)
    text = plain.choices[0].message.content
    stopped = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=32, stop=["Paris", "never there"]
    )
    assert stopped.choices[0].message.content == text[: text.index("Paris")]
    assert stopped.choices[0].finish_reason == "stop"


def test_a_seed_makes_a_draw_reproducible(stack: Stack, client: openai.OpenAI, tier: str) -> None:
    variant = "smollm2-135m-int8" if tier == "edge" else "smollm2-135m-fp32"
    ask: dict[str, Any] = {"model": variant, "messages": FRANCE, "temperature": 1.2, "max_tokens": 24}
    texts = [client.chat.completions.create(**ask, seed=seed).choices[0].message.content for seed in (7, 7, 8, 9, 10)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_cancel_in_mid_stream_frees_the_slot(stack: Stack, client: openai.OpenAI, tier: str) -> None:
    url = stack.edge_url if tier == "edge" else stack.cloud_url
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write a very long story about the sea."}],
        max_tokens=1500,
        stream=True,
        extra_headers={"x-request-id": f"cancelled-{tier}", "x-overspill-locality": "any"},
        extra_body={"ignore_eos": True},
    )
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    stream.close()

    def ended() -> dict[str, Any] | None:
        record = httpx.get(
            f"{url}/v1/decisions/cancelled-{tier}", headers={"authorization": f"Bearer {API_KEY}"}, timeout=60
        ).json()
        return None if record["outcome"] == "running" else record

    record = until_true(ended, every_s=0.05)
    assert record["outcome"] == "cancelled"
    assert record["tokens"] < 1500
    until_true(lambda: _running(url) == 0, every_s=0.05)  # its slot is free a moment after its record is closed


def _running(url: str) -> float:
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {API_KEY}"}, timeout=60).text
    running = [line for line in text.splitlines() if line.startswith("overspill_num_requests_running{")]
    assert running, "the gauge of running requests is gone from /metrics"
    return sum(float(line.rsplit(" ", 1)[1]) for line in running)
