"""What a tier below reads of brief events is what it reads of whole ones, in an eighth of the bytes."""

from __future__ import annotations

from typing import cast

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.gateway.sse import ChoiceEvents, Encoder
from router.upstream.exchange.answer import OpenStream
from router.upstream.exchange.call import UpstreamRequest
from router.upstream.http.silence import LostNews
from router.upstream.http.transport import Response
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import ChatPrompt, Message
from router.values.sampling import SamplingParams
from router.values.tool_calls import CLOSE, OPEN, Tool, Tools
from router.wire.openai.brief import BriefEncoder
from router.wire.openai.calls import AnswerCalls
from router.wire.openai.reply import EventEncoder, ReplyHead
from tests.router.upstream.servers.test_tier import ask

CALL = f'{OPEN}\n{{"name": "weather", "arguments": {{"city": "Ulm"}}}}\n{CLOSE}'
TOOLS = Tools((Tool("weather", "", "{}"),))


class Arrived:
    """A response that comes in these pieces."""

    status, headers, waits, left_bytes, complete = 200, {}, False, 0, True

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = filter(None, pieces)

    async def read(self) -> bytes:
        return next(self._pieces, b"")


def encoder(*, brief: bool, chat: bool = True, calls: bool = False) -> Encoder:
    head = ReplyHead(chat=chat, request_id="0123456789abcdef", created_s=1_790_000_000, model="smollm2-135m-int8")
    reads = AnswerCalls() if calls else None
    if brief:
        return BriefEncoder(head, reads)
    return EventEncoder(head, include_usage=True, running_usage=True, calls=reads)


def sent(chunks: list[TokenChunk], of: Encoder) -> list[bytes]:
    events = ChoiceEvents(of, prompt_tokens=5)
    pieces = [events.begin(chunks[0]), *(events.add(chunk) for chunk in chunks[1:])]
    return [*pieces, events.close(events.usage)]


async def read(pieces: list[bytes], *, tools: bool = False, stop: tuple[str, ...] = ()) -> list[TokenChunk]:
    request = ask(
        prompt=ChatPrompt((Message("user", "hi"),), TOOLS if tools else None), sampling=SamplingParams(stop=stop)
    )
    call = UpstreamRequest(request, "m", "upstream", context_tokens=4096, rtt_s=0.0)
    stream = OpenStream(cast("Response", Arrived(pieces)), call, LostNews())
    found: list[TokenChunk] = []
    while not (found and found[-1].finish_reason):
        found += await stream.read()
    return found


def pieces_of(text: str) -> list[str]:
    return [text[at : at + 3] for at in range(0, len(text), 3)]


CHUNKS = st.lists(
    st.builds(TokenChunk, st.text(max_size=4), st.integers(0, 3), reasoning=st.sampled_from(["", "", "hm"])), max_size=8
)
LAST = st.builds(
    TokenChunk,
    st.text(max_size=4),
    st.integers(0, 3),
    st.sampled_from(FinishReason),
    prompt_tokens=st.sampled_from([None, 7]),
    cached_tokens=st.sampled_from([None, 3]),
)


@given(CHUNKS, LAST)
@example([TokenChunk("", 0)], TokenChunk("0", 1, FinishReason.STOP, cached_tokens=3))
@example([TokenChunk("", 1)], TokenChunk("z", 0, FinishReason.STOP, prompt_tokens=7))
@pytest.mark.parametrize("chat", [True, False])
async def test_it_is_read_as_whole_events_are(chat: bool, chunks: list[TokenChunk], last: TokenChunk) -> None:
    if not chat:
        chunks = [TokenChunk(chunk.text, chunk.tokens) for chunk in chunks]
    whole, brief = [await read(sent([*chunks, last], encoder(brief=brief, chat=chat))) for brief in (False, True)]
    assert brief == whole


@pytest.mark.parametrize("said", ["", "Let me see.\n", "no <tool at all"])
async def test_calls_of_tools_are_too(said: str) -> None:
    chunks = [TokenChunk(piece) for piece in pieces_of(said + CALL)]
    chunks.append(TokenChunk("", 0, FinishReason.STOP))
    whole, brief = [await read(sent(chunks, encoder(brief=brief, calls=True)), tools=True) for brief in (False, True)]
    assert "".join(chunk.text for chunk in brief) == "".join(chunk.text for chunk in whole)
    assert [chunk.tokens for chunk in brief] == [chunk.tokens for chunk in whole]
    assert "weather" in "".join(chunk.text for chunk in brief)


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("told", ["END", "something else"])
async def test_which_stop_string_ended_an_answer_is_told_and_believed_where_it_was_asked_for(
    brief: bool, told: str
) -> None:
    chunks = [TokenChunk("a"), TokenChunk("b", 1, FinishReason.STOP, stop=told)]
    found = await read(sent(chunks, encoder(brief=brief)), stop=("x", "END"))
    assert [chunk.stop for chunk in found] == [*([None] * (len(found) - 1)), "END" if told == "END" else None]


@pytest.mark.parametrize(
    ("choice", "stop"),
    [
        ('"stop_reason":"END"', "END"),
        ('"matched_stop":"x"', "x"),
        ('"matched_stop":2', None),
        ('"stop_reason":[]', None),
    ],
)
async def test_it_is_read_in_the_words_of_vllm_and_of_sglang(choice: str, stop: str | None) -> None:
    event = 'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop",' + choice + "}]}\n\n"
    (last,) = await read([event.encode(), b"data: [DONE]\n\n"], stop=("x", "END"))
    assert (last.text, last.stop) == ("a", stop)


def test_a_token_takes_an_eighth_of_the_bytes() -> None:
    chunks = [TokenChunk(" word") for _ in range(100)]
    whole, brief = [sent(chunks, encoder(brief=brief)) for brief in (False, True)]
    assert len(brief[50]) <= 40
    assert len(brief[50]) < len(whole[50]) / 7


def test_every_event_is_one_that_clients_of_openai_can_read() -> None:
    for piece in sent(
        [TokenChunk("a"), TokenChunk("bc", 2), TokenChunk("", 0, FinishReason.STOP)], encoder(brief=True)
    ):
        for line in piece.decode().split("\n\n"):
            if line not in {"", "data: [DONE]"}:
                assert isinstance(orjson.loads(line.removeprefix("data: "))["choices"], list)
