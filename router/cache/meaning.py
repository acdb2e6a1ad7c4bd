"""What a request means, for answers that are given again to what means nearly the same.

Only the last message may differ, and only in its words: everything else of the request has to be the very same, and so
has every number in that message, because embeddings hardly tell numbers apart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from router.values.prompt import ChatPrompt, TextPrompt
from router.values.request import CacheUse, InferenceRequest

LONGEST_CHARS = 600
"""Of a text that is compared: models embed a few hundred tokens, and what lies behind those would not be seen."""
_NUMBERS = re.compile(r"[0-9]+")

Vector = npt.NDArray[np.float32]
Embed = Callable[[InferenceRequest, str], Awaitable[Vector | None]]
"""Embeds a text of a request where that request may go; None where that cannot be done now."""


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """Of a request.

    Attributes:
        rest: a digest of all that has to be the very same.
        vector: of the text that may differ; unit length.
    """

    rest: bytes
    vector: Vector


def key_parts(request: InferenceRequest) -> tuple[object, ...]:
    """Return all that an answer depends on, but for the prompt."""
    asked = request.objective
    return (
        request.cache_salt,
        request.model,
        type(request.prompt).__name__,
        request.sampling,
        request.continuation,
        asked.locality,
        asked.min_quality,
    )


def text_and_rest(request: InferenceRequest) -> tuple[str, bytes] | None:
    """Return the text of a request that may differ, and a digest of the rest; None where nothing may."""
    prompt = request.prompt
    sampling = request.sampling
    if not sampling.repeatable or request.continuation or request.cache is not CacheUse.FULL:
        return None
    if sampling.logprobs is not None or (isinstance(prompt, ChatPrompt) and prompt.media):  # another's would be told
        return None
    rest: object = None
    if isinstance(prompt, ChatPrompt) and prompt.messages:
        last = prompt.messages[-1]
        text, rest = last.content, replace(prompt, messages=(*prompt.messages[:-1], replace(last, content="")))
    elif isinstance(prompt, TextPrompt):
        text = prompt.text
    else:
        return None
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST_CHARS:
        return None
    try:
        packed = msgspec.msgpack.encode((*key_parts(request), rest, _NUMBERS.findall(text)))
    except (TypeError, ValueError, OverflowError):
        return None
    return text, hashlib.sha256(packed).digest()


async def meaning_of(request: InferenceRequest, embed: Embed) -> Meaning | None:
    """Return what a request means, None where only the very same will do."""
    parts = text_and_rest(request)
    if parts is None:
        return None
    text, rest = parts
    vector = await embed(request, text)
    return None if vector is None else Meaning(rest, vector)
