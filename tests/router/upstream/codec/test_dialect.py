"""What servers understand beyond OpenAI's API, and who they say they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.upstream.codec.dialect import DIALECTS, OVERSPILL, Dialect, dialect_of
from router.upstream.codec.openai import encode_http
from router.values.feature import Feature
from router.values.prompt import TokenPrompt
from router.values.request import Objective
from router.values.sampling import SamplingParams
from router.wire.openai.chat import decode_chat
from tests.router.upstream.servers.test_openai import ask

EVERYTHING = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    seed=3,
    stop=("x",),
    ignore_eos=True,
    min_p=0.1,
    min_tokens=2,
    stop_token_ids=(5,),
    logit_bias=((6, -1.0),),
    allowed_token_ids=(5, 6),
    logprobs=0,
)
OPENAI = {
    *("model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
}
LOGPROBS = {"logprobs", "top_logprobs"}
EXTRA = {
    "vllm": {
        *("top_k", "min_p", "repetition_penalty", "ignore_eos"),
        *("min_tokens", "stop_token_ids", "allowed_token_ids"),
    },
    "sglang": {"top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids"},
    "llama.cpp": {"top_k", "min_p", "repeat_penalty", "ignore_eos"},
    "ollama": set(),
    "plain": set(),
}


CALLERS = [("", ""), ("key-1", ""), ("key-2", ""), ("key-1", "user-1"), ("key-1", "user-2"), ("", "user-1")]


def body(dialect: Dialect, **changes: Any) -> dict[str, Any]:
    sent: dict[str, Any] = json.loads(encode_http(ask(**changes), Objective(), "m", 2048, dialect).body)
    return sent


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_server_is_sent_what_it_knows_and_nothing_else(name: str) -> None:
    sent = body(DIALECTS[name], sampling=EVERYTHING)
    assert sent.keys() == OPENAI | EXTRA[name] | (set() if name == "ollama" else LOGPROBS)
    if "repeat_penalty" in sent:
        assert sent["repeat_penalty"] == 1.1
    post = encode_http(ask(), Objective(ttft_s=1.0), "m", 2048, DIALECTS[name])
    assert not [header for header, _ in post.headers if header.startswith("x-overspill")]


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_cache_that_can_tell_callers_apart_is_told_them(name: str) -> None:
    salts = [body(DIALECTS[name], caller=caller, cache_salt=salt).get("cache_salt") for caller, salt in CALLERS]
    if name != "vllm":
        assert salts == [None] * len(CALLERS)
        return
    assert salts[0] is None
    assert len({*salts}) == len(CALLERS)
    assert all("key" not in salt and "user" not in salt for salt in salts[1:]), "digests, which tell nothing else"


def test_a_tier_of_ours_is_told_the_promise() -> None:
    post = encode_http(ask(), Objective(ttft_s=1.0), "m", 2048, OVERSPILL)
    assert dict(post.headers)["x-overspill-ttft-slo-ms"] == "1000.000"
    assert OVERSPILL.lacks == frozenset()


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_what_it_lacks_is_what_it_would_not_be_sent(name: str) -> None:
    dialect = DIALECTS[name]
    assert (Feature.TOP_K in dialect.lacks) == ("top_k" not in EXTRA[name])
    assert (Feature.IGNORE_EOS in dialect.lacks) == ("ignore_eos" not in EXTRA[name])
    assert (Feature.CONTINUED_CHAT in dialect.lacks) == (name in {"ollama", "plain"})
    assert (Feature.PROMPT_IDS in dialect.lacks) == (name not in {"vllm", "llama.cpp"})
    assert (Feature.ALLOWED_IDS in dialect.lacks) == ("allowed_token_ids" not in EXTRA[name])
    assert (Feature.STOP_IDS in dialect.lacks) == ("stop_token_ids" not in EXTRA[name])
    assert (Feature.LOGPROBS in dialect.lacks) == (name == "ollama")
    assert (Feature.PROMPT_LOGPROBS in dialect.lacks) == (name != "vllm")
    begun = ask(prompt=TokenPrompt((1, 2)), continuation="x", continuation_tokens=1)
    assert begun.needs() & dialect.lacks, "a continuation of token ids is known to tiers of ours only"


@pytest.mark.parametrize("name", ["vllm", "sglang", "llama.cpp"])
def test_sampling_that_nobody_asked_for_is_switched_off(name: str) -> None:
    sent = body(DIALECTS[name], sampling=SamplingParams())
    assert sent["top_p"] == 1.0
    assert sent["min_p"] == 0.0
    assert sent["top_k"] in {0, -1}


def test_only_the_known_owners_are_more_than_plain() -> None:
    assert dialect_of("VLLM").name == "vllm"
    for owner in ("", "openai", "None", "tgi", "ollama.ai", "\x00"):
        assert dialect_of(owner).name == "plain"


def test_log_probabilities_are_asked_for_as_each_path_has_them() -> None:
    asked = SamplingParams(logprobs=0, prompt_logprobs=True, min_tokens=9)
    chat = body(OVERSPILL, sampling=asked)
    assert (chat["logprobs"], chat["top_logprobs"], "echo" in chat) == (True, 0, False)
    ids = body(OVERSPILL, sampling=asked, prompt=TokenPrompt((1, 2)))
    assert (ids["logprobs"], ids["echo"], ids["min_tokens"]) == (0, True, 9)
    begun = body(OVERSPILL, sampling=asked, prompt=TokenPrompt((1, 2)), continuation="x", continuation_tokens=4)
    assert ("echo" in begun, begun["min_tokens"]) == (False, 5)
    assert body(DIALECTS["llama.cpp"], sampling=asked)["top_logprobs"] == 1


def test_a_tier_of_ours_reads_every_parameter_as_it_was() -> None:
    sent = encode_http(ask(sampling=EVERYTHING), Objective(), "m", 2048, OVERSPILL).body
    assert decode_chat(sent).sampling == EVERYTHING
