"""What is learnt of what models do not do: from a question of our own, and for a while."""

from __future__ import annotations

import io
import json
import wave
from base64 import b64decode
from collections.abc import AsyncGenerator

import pytest
from PIL import Image

from router.base.errors import InvalidRequest, ReplicaUnreachable
from router.upstream.codec.refusals import PageMissing
from router.upstream.servers.lessons import Lessons
from router.values.chunk import FinishReason, TokenChunk
from router.values.feature import Feature
from router.values.prompt import ChatPrompt, MediaPart, TextPrompt
from router.values.replica import ReplicaSnapshot
from router.values.request import InferenceRequest
from tests.support.clocks import VirtualClock
from tests.support.gateway_fakes import replica_info

IMAGES, AUDIO = Feature.IMAGES, Feature.AUDIO
BOTH = frozenset({IMAGES, AUDIO})


class Model:
    """A replica that takes what a test says, and keeps what it was shown."""

    link = None

    def __init__(self) -> None:
        self.info = replica_info("m")
        self.error: Exception | None = InvalidRequest("m is not a multimodal model")
        self.takes: frozenset[Feature] = frozenset()
        self.shown: list[MediaPart] = []

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.info, available=True, slots=1)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        if isinstance(request.prompt, TextPrompt):
            if self.error is not None:
                raise self.error
            yield TokenChunk("It", 1, FinishReason.LENGTH)
            return
        assert isinstance(request.prompt, ChatPrompt)
        _, part = request.prompt.messages[0].parts
        assert isinstance(part, MediaPart)
        self.shown.append(part)
        if self.error is not None and part.kind not in self.takes:
            raise self.error
        yield TokenChunk("grey", 1, FinishReason.STOP)


async def test_what_it_is_shown_is_an_image_and_a_sound() -> None:
    model = Model()
    await Lessons(VirtualClock()).ask(model, BOTH)
    told = {part.kind: json.loads(part.written) for part in model.shown}
    url = told[IMAGES]["image_url"]["url"]
    with Image.open(io.BytesIO(b64decode(url.removeprefix("data:image/png;base64,")))) as square:
        assert (square.size, square.convert("RGB").getpixel((5, 5))) == ((64, 64), (128, 128, 128))
    with wave.open(io.BytesIO(b64decode(told[AUDIO]["input_audio"]["data"]))) as silence:
        assert silence.getnframes() / silence.getframerate() == 1.0


async def test_a_lesson_ages_and_a_success_ends_it() -> None:
    clock, model = VirtualClock(), Model()
    lessons = Lessons(clock)
    assert lessons.may_ask("m")
    await lessons.ask(model, BOTH)
    assert lessons.refuses("m") == BOTH
    assert not lessons.may_ask("m"), "a moment ago it was"
    assert not lessons.due("m")
    clock.pass_s(601)
    assert lessons.due("m") == BOTH
    model.takes = frozenset({IMAGES})  # its server has become another
    await lessons.ask(model, lessons.due("m"))
    assert lessons.refuses("m") == {AUDIO}


async def test_a_page_that_is_not_there_is_asked_for_again() -> None:
    clock, model = VirtualClock(), Model()
    lessons, raw = Lessons(clock), frozenset({Feature.COMPLETIONS})
    await lessons.ask(model, raw)
    assert not lessons.refuses("m"), "what it said is of something else"
    model.error = PageMissing("m has no /v1/completions")
    await lessons.ask(model, raw)
    assert lessons.refuses("m") == raw
    clock.pass_s(601)
    assert lessons.due("m") == raw
    model.error = None
    await lessons.ask(model, raw)
    assert not lessons.refuses("m")


@pytest.mark.parametrize("error", [InvalidRequest("the image is too small"), ReplicaUnreachable("gone")])
async def test_what_says_nothing_of_the_model_teaches_nothing(error: Exception) -> None:
    clock, model = VirtualClock(), Model()
    lessons = Lessons(clock)
    model.error = error
    for known in (frozenset(), BOTH):
        lessons._lessons["m"] = known
        try:
            await lessons.ask(model, BOTH)
        except ReplicaUnreachable:
            assert error.__class__ is ReplicaUnreachable
        assert lessons.refuses("m") == known
        clock.pass_s(601)
