"""Usage is one truth: equal greedy answers of the real model cost the same figures on every tier, over every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from examples.demo.stack import API_KEY, Stack
from tests.support.patience import PATIENT

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

FAMILY = "smollm2-135m"
QUESTIONS = (
    "What is the capital of France?",
    "What is 2 + 2? Answer with the number alone.",
    "Say hello.",
    "Name the largest planet.",
)
RAW = ("The capital of France is", "One, two, three, four,", "The opposite of hot is")


@dataclass(frozen=True)
class Told:
    """What a tier said and what it counted."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Ask:
    chat: bool
    prompt: str
    max_tokens: int
    stop: str | None

    @property
    def body(self) -> dict[str, Any]:
        prompt = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        body = {"model": FAMILY, "temperature": 0, "max_tokens": self.max_tokens, **prompt}
        return body if self.stop is None else {**body, "stop": self.stop}


ASKS = st.one_of(
    st.builds(Ask, st.just(True), st.sampled_from(QUESTIONS), st.sampled_from((1, 3, 16)), st.none()),
    st.builds(Ask, st.just(True), st.sampled_from(QUESTIONS), st.just(16), st.sampled_from((".", "is", "4", "e"))),
    st.builds(Ask, st.just(False), st.sampled_from(RAW), st.integers(1, 8), st.sampled_from((None, " Paris", "five"))),
)
WAYS = ("whole", "stream", "running", "kserve")


class Door:
    """One tier, and the headers that make it answer where it should, in no hurry."""

    def __init__(self, http: httpx.Client, url: str, locality: str) -> None:
        self._http = http
        self._url = url
        self._headers = {"authorization": f"Bearer {API_KEY}", "x-overspill-locality": locality, **PATIENT}

    def told(self, ask: Ask, way: str) -> Told:
        if way == "kserve":
            return self._infer(ask)
        path = "/v1/chat/completions" if ask.chat else "/v1/completions"
        if way == "whole":
            reply = self._json(path, ask.body)
            choice = reply["choices"][0]
            return _told(choice["message"]["content"] if ask.chat else choice["text"], choice, reply["usage"])
        return self._streamed(path, ask, {"include_usage": True, "continuous_usage_stats": way == "running"})

    def _streamed(self, path: str, ask: Ask, options: dict[str, bool]) -> Told:
        reply = self._post(path, {**ask.body, "stream": True, "stream_options": options})
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        last, usage = events[-2], events[-1]["usage"]
        texts = [e["choices"][0] for e in events[:-1]]
        text = "".join((c["delta"].get("content") or "") if ask.chat else c["text"] for c in texts)
        if options["continuous_usage_stats"]:
            running = [event["usage"]["completion_tokens"] for event in events]
            assert running == sorted(running)
            assert running[-1] == running[-2], "the last event with text has all of it"
        return _told(text, last["choices"][0], usage)

    def _infer(self, ask: Ask) -> Told:
        parameters = {"max_tokens": ask.max_tokens, "temperature": 0, **({"stop": ask.stop} if ask.stop else {})}
        names = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
        body = {
            "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [ask.prompt]}],
            "parameters": parameters,
            "outputs": [{"name": name} for name in names],
        }
        reply = self._json(f"/v2/models/{FAMILY}/infer", body)
        found = {output["name"]: output["data"][0] for output in reply["outputs"]}
        return Told(*(found[name] for name in names))

    def _json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self._post(path, body).json()
        return found

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        reply = self._http.post(f"{self._url}{path}", json=body, headers=self._headers)
        assert reply.status_code == 200, reply.text
        return reply


def _told(text: str, choice: dict[str, Any], usage: dict[str, Any]) -> Told:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) <= usage["prompt_tokens"]
    return Told(text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


def test_equal_greedy_answers_cost_the_same_figures_on_both_tiers_and_through_both(
    stack: Stack, http: httpx.Client
) -> None:
    device, cloud = Door(http, stack.edge_url, "local-only"), Door(http, stack.cloud_url, "any")
    through = Door(http, stack.edge_url, "cloud-only")
    alike: set[tuple[str, str]] = set()

    @settings(max_examples=20)
    @given(ASKS, st.sampled_from(WAYS))
    @example(Ask(chat=True, prompt=QUESTIONS[0], max_tokens=16, stop=None), "whole")
    @example(Ask(chat=True, prompt=QUESTIONS[0], max_tokens=16, stop="Paris"), "stream")
    @example(Ask(chat=True, prompt=QUESTIONS[0], max_tokens=3, stop=None), "running")
    @example(Ask(chat=False, prompt=RAW[0], max_tokens=2, stop=None), "kserve")
    def holds(ask: Ask, way: str) -> None:
        assume(not ask.chat or way != "kserve")
        told = cloud.told(ask, way)
        assert told.completion_tokens <= ask.max_tokens
        assert through.told(ask, way) == told
        local = device.told(ask, way)
        if (local.text, local.finish_reason) == (told.text, told.finish_reason):  # INT8 says other things at times
            assert local == told
            alike.add((way, told.finish_reason))

    holds()
    assert {reason for _, reason in alike} == {"stop", "length"}, alike
    assert {way for way, _ in alike} == set(WAYS), alike


def test_the_token_that_ends_an_answer_counts(stack: Stack, http: httpx.Client) -> None:
    ask = Ask(chat=True, prompt=QUESTIONS[0], max_tokens=48, stop=None)
    for door in (Door(http, stack.edge_url, "local-only"), Door(http, stack.cloud_url, "any")):
        told = door.told(ask, "whole")
        assert (told.text, told.finish_reason) == ("The capital of France is Paris.", "stop")
        assert told.completion_tokens == 8, "seven tokens of text, and <|im_end|>"
