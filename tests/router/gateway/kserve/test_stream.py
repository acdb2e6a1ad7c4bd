"""Pieces of generate_stream: what is there at once is one event, and no text is lost to what breaks behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import pytest
from prometheus_client import CollectorRegistry

from router.base.errors import ReplicaBroken
from router.gateway.kserve.stream import GenerateStream
from router.gateway.metrics import GatewayMetrics
from router.values.answer import Answer, Route
from router.values.chunk import FinishReason, TokenChunk
from router.values.sampling import SamplingParams
from router.wire.kserve.call import InferCall, PromptCall

CALL = InferCall(
    None,
    (PromptCall("p ", SamplingParams()),),
    (1,),
    echo=True,
    outputs=(("text_output", False), ("finish_reason", False)),
)


async def chunks(*pieces: str, broken: bool) -> AsyncGenerator[TokenChunk, None]:
    for piece in pieces:
        yield TokenChunk(piece)
    if broken:
        raise ReplicaBroken("the replica died")
    yield TokenChunk("", 0, FinishReason.STOP)


def stream(*pieces: str, broken: bool = False) -> GenerateStream:
    """A stream all of whose pieces are there at once."""
    route = Route("cloud", "tiny", 0, "only", degraded=False, predicted_ttft_s=None)
    answer = Answer(route, chunks(*pieces, broken=broken), lambda: True)
    return GenerateStream("tiny", CALL, answer, 1, request_id="r", metrics=GatewayMetrics(CollectorRegistry()))


async def events(made: GenerateStream) -> list[dict]:
    found = [await made.first()]
    while not made.ended:
        found.append(await made.next())
    return [json.loads(piece.removeprefix(b"data: ")) for piece in found]


async def test_what_is_there_at_once_is_one_event_and_the_prompt_is_repeated_once() -> None:
    (event,) = await events(stream("one", " two"))
    assert (event["text_output"], event["finish_reason"]) == ("p one two", "stop")


async def test_text_that_came_before_a_break_is_told_before_it() -> None:
    text, error = await events(stream("one", " two", broken=True))
    assert (text["text_output"], text["finish_reason"]) == ("p one two", "")
    assert error == {"error": "the replica died"}
    with pytest.raises(ReplicaBroken):
        await stream(broken=True).first()
