"""Bodies decode strictly; an integer is a number without a fraction, however it is written."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest

from router.base.errors import InvalidRequest
from router.wire.body import decode_json
from router.wire.kserve.parameters import read_parameters
from router.wire.openai.chat import decode_chat
from router.wire.openai.completion import decode_completion
from router.wire.openai.responses import decode_responses

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Inner(msgspec.Struct, frozen=True):
    many: list[int]
    share: float = 0.0


class Body(msgspec.Struct, frozen=True):
    count: int | None = None
    inner: Inner | None = None
    left: msgspec.Raw = msgspec.Raw(b"")
    other: Any = None


DECODER = msgspec.json.Decoder(Body)


def test_integers_may_be_written_as_floats() -> None:
    found = decode_json(DECODER, b'{"count": 4.0, "inner": {"many": [1.0, 2, 3e2], "share": 2.0}, "other": 5.0}')
    assert found == Body(count=4, inner=Inner([1, 2, 300], 2.0), other=5.0)
    assert [type(value) for value in (found.count, found.inner.many[2], found.other)] == [int, int, float]
    assert bytes(decode_json(DECODER, b'{"count": -7.0, "left": [1.0,  2]}').left) == b"[1.0,  2]"
    body = decode_chat(orjson.dumps({**HELLO, "max_tokens": 4.0, "n": 1.0, "seed": 3.0, "top_k": 5.0}))
    assert (body.sampling.max_tokens, body.sampling.seed, body.sampling.top_k) == (4, 3, 5)
    prompts = {"model": "m", "prompt": [[1.0, 2.0], [3.0]], "max_tokens": 4.0, "logit_bias": {"5": 1.0}}
    assert decode_completion(orjson.dumps(prompts)).sampling.max_tokens == 4
    request, _ = decode_responses(b'{"model": "m", "input": "hello", "max_output_tokens": 32.0}')
    assert request.sampling.max_tokens == 32
    assert read_parameters({"max_tokens": 4.0, "temperature": 1.0}, {}).max_tokens == 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 4.5}, "`max_tokens` = 4.5: Expected `int | null`, got `float`"),
        ({"max_tokens": 4.0, "n": 1.5}, "`n` = 1.5: Expected"),
        ({"max_tokens": -4.0}, "`max_tokens` = -4: Expected `int` >= 1"),
        ({"max_tokens": 1e30}, "`max_tokens` = 1e+30: Expected"),
        ({"max_tokens": "4.0"}, "`max_tokens`: Expected"),
        ({"stream": 1.0}, "`stream` = 1"),
    ],
)
def test_what_is_no_integer_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_chat(orjson.dumps({**HELLO, **fields}))
    assert said in str(caught.value)
    with pytest.raises(InvalidRequest):
        read_parameters(fields, {})


FINE = {
    "lists": "[" + ",".join(["[]"] * 450_000) + "]",
    "objects": "[" + ",".join(["{}"] * 450_000) + "]",
    "fields": "{" + ",".join([f'"k{n}":0' for n in range(450_000)]) + "}",
}


@pytest.mark.parametrize("kind", FINE)
def test_a_body_that_everybody_would_wait_for_is_not_read(kind: str) -> None:
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}], "metadata": {{"a": {FINE[kind]}}}}}'
    with pytest.raises(InvalidRequest, match="400,000 lists, objects and fields"):
        decode_chat(body.encode())


def test_a_long_text_of_json_and_many_numbers_are_read() -> None:
    text = "".join([f'{{"name": "number {n}", "value": [{n}]}}\n' for n in range(60_000)])
    assert len(text) > 2_000_000
    prompt = decode_chat(orjson.dumps({**HELLO, "messages": [{"role": "user", "content": text}]})).prompt
    assert prompt.messages[0].content == text
    tokens = decode_completion(orjson.dumps({"model": "m", "prompt": [7] * 500_000})).prompt
    assert len(tokens.token_ids) == 500_000
