"""Calls through the real dispatcher: the task decides who may serve, windows hold the longest input, bursts pass."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from msgspec.structs import replace

from router.base.errors import ContextTooLong, DeadlineLost, InvalidRequest
from router.dispatch.dispatcher import Dispatcher
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import TextPrompt
from router.values.prompt_size import estimate_size
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings
from router.values.task import GENERATES, EmbedCall, Embeddings, PassedCall, Task


class Encoder:
    """Answers every call with one vector; its own watch says what it is told to say."""

    link = None

    def __init__(
        self, name: str = "enc", tasks: frozenset[Task] = frozenset({Task.EMBED}), own_s: float = 0.002
    ) -> None:
        prior = SpeedPrior(5000.0, 500.0, 0.0)
        self.info = ReplicaInfo(
            f"local/{name}", "local", "edge", False, name, f"{name}-int8", 0, 1.0, 16, prior, tasks=tasks
        )
        self.own_s = own_s
        self.late = False

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.info, available=True, slots=64)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.late:
            raise DeadlineLost("dropped", retry_after_s=1.0)
        output = Embeddings(b"\0\0\x80\x3f", 1)
        yield TokenChunk("", 1, FinishReason.STOP, 3, output=output, own_s=self.own_s)


def call(*inputs: str | tuple[int, ...], model: str = "enc", deadline_s: float | None = None) -> InferenceRequest:
    prompt = EmbedCall(inputs)
    size = estimate_size(prompt)
    return InferenceRequest(
        request_id=f"r{id(prompt)}",
        model=model,
        prompt=prompt,
        sampling=SamplingParams(max_tokens=1),
        objective=Objective(deadline_s=deadline_s),
        prompt_tokens=size.tokens,
        prompt_slack=size.slack,
        window_tokens=size.window,
        accepted_at_s=0.0,
    )


async def ask(dispatcher: Dispatcher, request: InferenceRequest) -> TokenChunk:
    request = replace(request, accepted_at_s=dispatcher.clock.now_s())
    answer = await dispatcher.start(request)
    chunks = [chunk async for chunk in answer.chunks]
    assert len(chunks) == 1
    return chunks[0]


async def test_a_call_is_answered_in_one_piece() -> None:
    async with Dispatcher([Encoder(), Encoder("llm", GENERATES)], RouterSettings()) as dispatcher:
        chunk = await ask(dispatcher, call("hello"))
        assert chunk.output == Embeddings(b"\0\0\x80\x3f", 1)


async def test_who_does_something_else_is_no_candidate() -> None:
    async with Dispatcher([Encoder("llm", GENERATES)], RouterSettings()) as dispatcher:
        with pytest.raises(InvalidRequest, match="can generate, asked to embed"):
            await ask(dispatcher, call("hello", model="llm"))
    async with Dispatcher([Encoder()], RouterSettings()) as dispatcher:
        request = call("hello")
        text = replace(request, prompt=TextPrompt("hello"), window_tokens=None)
        with pytest.raises(InvalidRequest, match="can embed, asked to generate"):
            await ask(dispatcher, text)


async def test_a_window_holds_one_input_and_a_call_many() -> None:
    async with Dispatcher([Encoder()], RouterSettings()) as dispatcher:
        await ask(dispatcher, call(*[tuple(range(16))] * 100))  # 1,600 tokens, 16 at a time
        with pytest.raises(ContextTooLong, match="longest input has at least 17 tokens") as caught:
            await ask(dispatcher, call((1,), tuple(range(17))))
        assert caught.value.param == "input"


async def test_how_long_sounds_take_is_believed() -> None:
    sound = PassedCall(Task.TRANSCRIBE, "/v1/audio/transcriptions", "multipart/form-data", b"", b"")
    listener = Encoder(tasks=frozenset({Task.TRANSCRIBE}), own_s=5.0)
    async with Dispatcher([listener], RouterSettings()) as dispatcher:
        request = replace(call("hello"), prompt=sound, window_tokens=1)
        for _ in range(50):
            await ask(dispatcher, request)
        with pytest.raises(DeadlineLost):
            await ask(dispatcher, replace(request, objective=Objective(deadline_s=0.25)))


async def test_after_a_burst_an_idle_model_is_asked_again() -> None:
    encoder = Encoder(own_s=2.0)
    async with Dispatcher([encoder], RouterSettings()) as dispatcher:
        for _ in range(50):  # everybody had waited for everybody else
            await ask(dispatcher, call("hello"))
        encoder.own_s = 0.002
        for _ in range(5):
            await ask(dispatcher, call("hello", deadline_s=0.25))
