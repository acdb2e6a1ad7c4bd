"""What our own gateway tells of tokens is read back as it was, and what others tell is read as far as it goes."""

from __future__ import annotations

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.upstream.codec.logprobs import EchoedPrompt, Logprobs
from router.values.logprobs import Alternative, TokenLogprob
from router.values.prompt import Prompt, TextPrompt, TokenPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.wire.openai.logprobs import LogprobEncoder

RAW = st.one_of(st.text(min_size=1, max_size=4).map(str.encode), st.binary(min_size=1, max_size=3))
NUMBERS = st.floats(-50, 0).map(lambda value: round(value, 4))


def token(raw: bytes, logprob: float, top: tuple[Alternative, ...] = ()) -> TokenLogprob:
    return TokenLogprob(raw.decode("utf-8", "replace"), logprob, raw, top=top)


TOPS = st.lists(st.tuples(RAW, NUMBERS), max_size=3, unique_by=(lambda one: one[0], lambda one: one[1]))
TOKENS = st.lists(
    st.builds(
        lambda raw, logprob, top: token(
            raw,
            logprob,
            tuple(
                Alternative(other.decode("utf-8", "replace"), value, other)
                for other, value in sorted(top, key=lambda one: -one[1])
            ),
        ),
        RAW,
        NUMBERS,
        TOPS,
    ),
    max_size=5,
)


@given(TOKENS)
def test_a_chats_log_probabilities_are_read_as_they_were_told(tokens: list[TokenLogprob]) -> None:
    told = orjson.dumps(LogprobEncoder(chat=True).encode(tokens))
    assert list(msgspec.json.decode(told, type=Logprobs).values(3)) == tokens


@given(TOKENS)
def test_a_completions_log_probabilities_keep_texts_and_bytes_of_half_characters(tokens: list[TokenLogprob]) -> None:
    told = orjson.dumps(LogprobEncoder(chat=False).encode(tokens))
    read = msgspec.json.decode(told, type=Logprobs).values(4)
    assert [(one.text, one.logprob) for one in read] == [(one.text, one.logprob) for one in tokens]
    assert all(one.raw in (None, was.raw) for one, was in zip(read, tokens, strict=True))
    for one, was in zip(read, tokens, strict=True):
        assert {other.text for other in was.top} <= {other.text for other in one.top}


def test_what_is_no_number_is_the_least() -> None:
    told = msgspec.json.decode(b'{"content":[{"token":"a","logprob":null}]}', type=Logprobs).values(0)
    assert told == (TokenLogprob("a", -9999.0),)


def test_the_shapes_of_vllm_and_llama_cpp_are_read() -> None:
    """llama.cpp has the shape of chats on both paths; vLLM lists the token that came among the alternatives."""
    llama = b"""{"content":[{"id":260,"token":" the","bytes":[32,116,104,101],"logprob":-2.75,
        "top_logprobs":[{"id":7042,"token":" Paris","bytes":[32,80],"logprob":-0.25}]}]}"""
    (the,) = msgspec.json.decode(llama, type=Logprobs).values(1)
    assert (the.text, the.raw, the.logprob, the.top) == (" the", b" the", -2.75, (Alternative(" Paris", -0.25, b" P"),))
    vllm = b"""{"text_offset":[0,3],"token_logprobs":[null,-11.5],"tokens":["The"," capital"],
        "top_logprobs":[null,{" capital":-11.5,"\\n":-1.5}]}"""
    first, second = msgspec.json.decode(vllm, type=Logprobs).values(1)
    assert (first.text, first.logprob, first.top) == ("The", None, ())
    assert (second.text, second.logprob, second.top) == (" capital", -11.5, (Alternative("\n", -1.5),))


def request(prompt: Prompt) -> InferenceRequest:
    return InferenceRequest("r", "m", prompt, SamplingParams(logprobs=0, prompt_logprobs=True), Objective(), 2, 0.0)


@pytest.mark.parametrize("prompt", [TextPrompt("say b"), TokenPrompt((1, 2))])
@pytest.mark.parametrize(("rest", "counted"), [("", None), ("", 2), (" c", 2)])
def test_the_prompt_is_told_apart_from_the_answer(prompt: Prompt, rest: str, counted: int | None) -> None:
    told = (token(b"say", -1.0), token(b" b", -1.0), *((token(rest.encode(), -2.0),) if rest else ()))
    echo = EchoedPrompt(request(prompt))
    text, of_prompt, of_answer = echo.split("say b" + rest, told, counted)
    assert (text, [one.text for one in of_prompt], [one.text for one in of_answer]) == (
        rest,
        ["say", " b"],
        [rest] if rest else [],
    )
    assert echo.whole
