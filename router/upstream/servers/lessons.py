"""What models of a server turn out not to do: images, sounds, raw completions; asked by ourselves, and again later.

A caller's refusal is only the occasion. What it says may be of that one request, or in that request's own words, and a
lesson from it would keep everybody's images away. Completions go by a page of their own, which hosted APIs often lack.
"""

from __future__ import annotations

import base64
import contextlib
import struct
import zlib
from collections.abc import Mapping

import orjson

from router.base.clock import Clock
from router.base.errors import InvalidRequest
from router.upstream.codec.refusals import PageMissing
from router.upstream.servers.abilities import refuses_media
from router.values.feature import NOTHING, Feature
from router.values.prompt import ChatPrompt, MediaPart, Message, TextPrompt
from router.values.replica import Replica
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.wire.openai.media import silent_wav

_HOLDS_S = 600.0
_APART_S = 30.0  # two questions about one model, whatever its callers send
_SIDE = 64  # pixels: some models take no smaller ones
_QUESTION = "What is this?"
_PROMPT_TOKENS = 600


class Lessons:
    """What is known of the models of one server."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lessons: dict[str, frozenset[Feature]] = {}
        self._asked_at_s: dict[str, float] = {}

    def refuses(self, variant: str) -> frozenset[Feature]:
        """Return what a model does not do."""
        return self._lessons.get(variant, NOTHING)

    def may_ask(self, variant: str) -> bool:
        """Whether a model was not asked a moment ago."""
        asked_at_s = self._asked_at_s.get(variant)
        return asked_at_s is None or self._clock.now_s() - asked_at_s >= _APART_S

    def due(self, variant: str) -> frozenset[Feature]:
        """Return what a model had better be asked again: its server may have become another."""
        aged = self._clock.now_s() - self._asked_at_s.get(variant, 0.0) >= _HOLDS_S
        return self.refuses(variant) if aged else NOTHING

    async def ask(self, replica: Replica, features: frozenset[Feature]) -> None:
        """Ask a model for each of these, and learn from its answer, whichever it is.

        Raises:
            OverspillError: it says nothing, and nothing is learnt.
        """
        variant = replica.info.variant
        self._asked_at_s[variant] = self._clock.now_s()
        for kind in sorted(features, key=lambda feature: feature.value):
            known = self.refuses(variant)
            try:
                await _answered(replica, kind, self._clock)
            except InvalidRequest as error:
                if teaches(kind, error):
                    self._lessons[variant] = known | {kind}
            else:
                self._lessons[variant] = known - {kind}


def teaches(feature: Feature, error: InvalidRequest) -> bool:
    """Whether a refusal may mean that a model does not do this at all."""
    return isinstance(error, PageMissing) if feature is Feature.COMPLETIONS else refuses_media(error.message)


async def _answered(replica: Replica, kind: Feature, clock: Clock) -> None:
    """Put a question of this kind, and wait for one token."""
    request = InferenceRequest(
        request_id=f"takes-{kind.value.replace(' ', '-')}",
        model=replica.info.variant,
        prompt=TextPrompt(_QUESTION) if kind is Feature.COMPLETIONS else _shown(kind),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        objective=Objective(),
        prompt_tokens=_PROMPT_TOKENS,
        accepted_at_s=clock.now_s(),
    )
    async with contextlib.aclosing(replica.generate(request)) as stream:
        async for _ in stream:
            pass


def _shown(kind: Feature) -> ChatPrompt:
    message = Message("user", _QUESTION, parts=(_QUESTION, MediaPart(kind, _written(kind))))
    return ChatPrompt((message,), media=frozenset({kind}))


def _written(kind: Feature) -> bytes:
    """Return a part of a message as OpenAI's API has it: a grey square, or a second of silence."""
    if kind is Feature.IMAGES:
        url = "data:image/png;base64," + base64.b64encode(_square()).decode()
        told: Mapping[str, object] = {"type": "image_url", "image_url": {"url": url}}
    else:
        data = base64.b64encode(silent_wav(16_000)).decode()
        told = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return orjson.dumps(told)


def _square() -> bytes:
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\x80" * 3 * _SIDE) * _SIDE
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    written = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)
