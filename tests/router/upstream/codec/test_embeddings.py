"""Replies of embedding servers, honest and not: base64 and numbers become vectors, all else an error of the server."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import ReplicaFailed
from router.upstream.codec.embeddings import decode_answer, encode_call
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.task import EmbedCall, Embeddings
from router.wire.openai.embeddings import decode_embeddings, encode_embeddings


def request(*inputs: str | tuple[int, ...], dimensions: int | None = None) -> InferenceRequest:
    return InferenceRequest(
        request_id="r",
        model="m",
        prompt=EmbedCall(inputs, dimensions),
        sampling=SamplingParams(max_tokens=1),
        objective=Objective(),
        prompt_tokens=3,
        accepted_at_s=0.0,
    )


def coded(*numbers: float) -> str:
    return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()


def body(*vectors: object, **more: object) -> bytes:
    data = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return json.dumps({"data": data, **more}).encode()


@given(
    st.lists(
        st.one_of(st.text(min_size=1), st.lists(st.integers(0, 2**31 - 1), min_size=1).map(tuple)),
        min_size=1,
        max_size=9,
    ).map(tuple),
    st.one_of(st.none(), st.integers(1, 4096)),
)
def test_what_one_tier_writes_another_reads(inputs: tuple[str | tuple[int, ...], ...], dimensions: int | None) -> None:
    try:
        written = encode_call(EmbedCall(inputs, dimensions), "m")
    except TypeError:
        return  # half a surrogate pair: JSON takes none, and `encode_http` says so
    asked = decode_embeddings(written)
    assert asked.request.prompt == EmbedCall(inputs, dimensions)
    assert asked.encoding == "base64"


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_vectors_survive_the_way(encoding: str) -> None:
    there = decode_answer(body(coded(1, 2.5), coded(-0.1, 3e-9)), request("a", "b"), None, "who")
    assert there.output is not None
    reply = encode_embeddings("m", there.output, encoding, 7)  # type: ignore[arg-type]
    back = decode_answer(reply, request("a", "b"), None, "who")
    assert back.output == there.output
    assert back.prompt_tokens == 7
    assert isinstance(there.output, Embeddings)
    assert len(there.output) == 2


def test_order_is_by_index() -> None:
    data = [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]
    answer = decode_answer(json.dumps({"data": data}).encode(), request("a", "b"), None, "who")
    assert answer.output is not None
    assert np.frombuffer(answer.output.data, "<f4").tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"[]",
        b'{"data": 3}',
        body([1.0]),
        body([1.0], [1.0, 2.0]),
        body([], []),
        body("AAA=", "AAA="),
        body("not base64!", "not base64!"),
        body([1e999, 1.0], [1.0, 1.0]).replace(b"Infinity", b"1e999"),
    ],
)
def test_other_replies_are_the_server_s_fault(reply: bytes) -> None:
    with pytest.raises(ReplicaFailed, match="who"):
        decode_answer(reply, request("a", "b"), None, "who")
