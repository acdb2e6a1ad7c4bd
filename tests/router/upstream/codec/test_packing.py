"""Which bodies are compressed for a slow uplink."""

from __future__ import annotations

import gzip
import random

import pytest

from router.upstream.codec.openai import HttpRequest
from router.upstream.codec.packing import packed


def request(body: bytes) -> HttpRequest:
    return HttpRequest("/v1/chat/completions", [("content-type", "application/json")], body)


def test_text_is() -> None:
    asked = request(b'{"messages":[{"role":"user","content":"what is it, and why?"}]}' * 200)
    sent = packed(asked)
    assert gzip.decompress(sent.body) == asked.body
    assert len(sent.body) < len(asked.body) / 3
    assert sent.headers == [*asked.headers, ("content-encoding", "gzip")]
    assert packed(asked).body == sent.body, "no time of day in it"


@pytest.mark.parametrize(
    "body", [b"x" * 4095, b"x" * (128 * 1024 + 1), random.Random(1).randbytes(50_000)], ids=["small", "large", "noise"]
)
def test_what_would_not_pay_is_not(body: bytes) -> None:
    asked = request(body)
    assert packed(asked) is asked
