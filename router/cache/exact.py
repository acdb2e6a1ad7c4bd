"""Answers that are given again to who asks for the very same, where that would come out the same: exact, and private.

An answer is kept under all that it depends on and under whose it is: the caller and its cache salt. Only repeatable
requests have a key (temperature 0, or a seed); only whole answers of one replica at full quality are kept.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

import msgspec
import numpy as np
from msgspec.structs import replace

from router.base.clock import Clock
from router.cache.meaning import Meaning, key_parts
from router.cache.settings import CacheSettings
from router.values.answer import Answer, Route
from router.values.chunk import TokenChunk
from router.values.prompt import ChatPrompt, TextPrompt, TokenPrompt
from router.values.replica import ReplicaInfo
from router.values.request import CacheUse, InferenceRequest
from router.values.usage import Usage

_CHUNK_BYTES = 240  # of a chunk beside its text: the object, its fields, its place in a list
_ENTRY_BYTES = 700
_LONGEST_SHARE = 0.25  # of the memory, for one answer
_MOST_COMPARED = 4096  # answers of one caller, the latest ones


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer.

    Attributes:
        replicas: what served its variant then: another version would answer otherwise.
    """

    chunks: tuple[TokenChunk, ...]
    route: Route
    usage: Usage
    replicas: frozenset[tuple[str, str]]
    size_bytes: int
    kept_at_s: float
    meaning: Meaning | None = None


@dataclass(frozen=True, slots=True)
class _Wish:
    """Under what an answer is to be kept."""

    key: bytes
    caller: str
    meaning: Meaning | None


class AnswerCache:
    """The answers of one tier. When its memory is full, the caller who holds most loses its longest unused answer.

    Args:
        models: the replicas that there are now.

    Attributes:
        similar_above: least likeness of what means nearly the same.
        hits, similar, misses, kept, evicted: counted since the start; `similar` ones were misses before, `evicted` went
            for want of memory.
        size_bytes: of all answers.
    """

    def __init__(self, settings: CacheSettings, clock: Clock, models: Callable[[], Sequence[ReplicaInfo]]) -> None:
        self._most_bytes = settings.max_mbytes * 1_000_000
        self._max_age_s = settings.max_age_s
        self._clock = clock
        self._models = models
        self._answers: dict[str, OrderedDict[bytes, Kept]] = {}  # by caller
        self._bytes: dict[str, int] = {}
        self.size_bytes = 0
        self.similar_above = settings.similar_above
        self.hits = self.similar = self.misses = self.kept = self.evicted = 0

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def find(self, request: InferenceRequest) -> Answer | None:
        """Return the answer to a request that was asked before by the same caller, as a stream of the same chunks."""
        key = _key(request) if self._most_bytes else None
        if key is None or request.cache is not CacheUse.FULL:
            return None
        own = self._answers.get(request.caller)
        found = None if own is None else own.get(key)
        if found is None or not self._holds(found, self._serving):
            self.misses += 1
            if found is not None:
                self._drop(request.caller, key)
            return None
        self.hits += 1
        return self._given(request.caller, key, found)

    def find_like(self, request: InferenceRequest, meaning: Meaning) -> Answer | None:
        """Return the answer to what means nearly the same, where all else of the request is the very same."""
        own: OrderedDict[bytes, Kept] = self._answers.get(request.caller, OrderedDict())
        serving = cache(self._serving)  # thousands of answers are of few variants
        alike = [
            (key, kept)
            for key, kept in islice(reversed(own.items()), _MOST_COMPARED)
            if kept.meaning is not None and kept.meaning.rest == meaning.rest and self._holds(kept, serving)
        ]
        if not alike or request.cache is not CacheUse.FULL:
            return None
        likeness = np.stack([kept.meaning.vector for _, kept in alike if kept.meaning is not None]) @ meaning.vector
        best = int(likeness.argmax())
        if likeness[best] < self.similar_above:
            return None
        self.similar += 1
        return self._given(request.caller, *alike[best])

    def _given(self, caller: str, key: bytes, found: Kept) -> Answer:
        self._answers[caller].move_to_end(key)
        told = replace(found.usage, cached_tokens=found.usage.prompt_tokens)
        return Answer(found.route, _replayed(found), _at_once, lambda: told, cache="hit")

    def keep(self, request: InferenceRequest, answer: Answer, meaning: Meaning | None = None) -> Answer:
        """Return the same answer, which is kept once it is whole, if it may be given again."""
        key = _key(request) if self._most_bytes else None
        if key is None or request.cache is CacheUse.NOTHING:
            return answer
        answer.chunks = self._kept_at_end(_Wish(key, request.caller, meaning), answer, answer.chunks)
        answer.cache = "miss"
        return answer

    async def _kept_at_end(
        self, wish: _Wish, answer: Answer, source: AsyncGenerator[TokenChunk, None]
    ) -> AsyncGenerator[TokenChunk, None]:
        seen, size = list[TokenChunk](), _ENTRY_BYTES
        most_bytes = self._most_bytes * _LONGEST_SHARE
        try:
            async for chunk in source:
                size += _CHUNK_BYTES + _text_bytes(chunk.text) + _text_bytes(chunk.reasoning)
                if size <= most_bytes:
                    seen.append(replace(chunk, origin=None) if chunk.origin is not None else chunk)
                    if chunk.finish_reason is not None and answer.seamless() and not answer.route.degraded:
                        self._put(wish, tuple(seen), answer, size)
                else:
                    seen.clear()
                yield chunk
        finally:
            await source.aclose()

    def _put(self, wish: _Wish, chunks: tuple[TokenChunk, ...], answer: Answer, size: int) -> None:
        key, caller = wish.key, wish.caller
        size += 0 if wish.meaning is None else wish.meaning.vector.nbytes
        if key in self._answers.get(caller, {}):
            self._drop(caller, key)
        route = replace(answer.route, reason="cache", predicted_ttft_s=None)
        replicas = self._serving(answer.route.variant)
        kept = Kept(chunks, route, answer.used(), replicas, size, self._clock.now_s(), wish.meaning)
        self._answers.setdefault(caller, OrderedDict())[key] = kept
        self._bytes[caller] = self._bytes.get(caller, 0) + size
        self.size_bytes += size
        self.kept += 1
        while self.size_bytes > self._most_bytes:
            most = max(self._bytes, key=self._bytes.__getitem__)
            self._drop(most, next(iter(self._answers[most])))
            self.evicted += 1

    def _holds(self, kept: Kept, serving: Callable[[str], frozenset[tuple[str, str]]]) -> bool:
        fresh = self._clock.now_s() - kept.kept_at_s <= self._max_age_s
        return fresh and bool(kept.replicas) and kept.replicas == serving(kept.route.variant)

    def _serving(self, variant: str) -> frozenset[tuple[str, str]]:
        return frozenset((info.replica_id, info.version) for info in self._models() if info.variant == variant)

    def _drop(self, caller: str, key: bytes) -> None:
        own = self._answers[caller]
        size = own.pop(key).size_bytes
        self.size_bytes -= size
        self._bytes[caller] -= size
        if not own:
            del self._answers[caller], self._bytes[caller]


def _text_bytes(text: str) -> int:
    """Return at most what a text takes of the memory: four bytes a character, where one of them is not ASCII."""
    return len(text) if text.isascii() else 4 * len(text)


def _key(request: InferenceRequest) -> bytes | None:
    """Return a digest of all that an answer depends on, None where it need not come out the same."""
    prompt = request.prompt
    if not request.sampling.repeatable or not isinstance(prompt, (ChatPrompt, TextPrompt, TokenPrompt)):
        return None
    if isinstance(prompt, ChatPrompt) and prompt.media:  # what stands behind a URL changes, and images are large
        return None
    if request.sampling.logprobs is not None:  # many times as large as the text that they belong to
        return None
    what = (*key_parts(request), prompt)
    try:
        return hashlib.sha256(msgspec.msgpack.encode(what)).digest()
    except (TypeError, ValueError, OverflowError):  # half a surrogate pair, say: it is served, and not kept
        return None


async def _replayed(kept: Kept) -> AsyncGenerator[TokenChunk, None]:
    for index, chunk in enumerate(kept.chunks):
        last = chunk.finish_reason is not None
        cached = kept.usage.prompt_tokens if index == 0 or last else None
        yield replace(chunk, cached_tokens=cached, prompt_tokens=kept.usage.prompt_tokens if last else None)


def _at_once() -> bool:
    return True
