"""Tokens of one exchange, as its caller is told them and as they are counted against its limits: one truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec


class TokenDetails(msgspec.Struct, frozen=True):
    """What else a server tells of the tokens of an exchange, by the names of OpenAI's API.

    Attributes:
        prompt: `cache_write_tokens`, `audio_tokens`, …; what a cache held is none of it, for it is counted here.
        completion: `reasoning_tokens`, `accepted_prediction_tokens`, ….
    """

    prompt: Mapping[str, int]
    completion: Mapping[str, int]

    def __add__(self, other: TokenDetails) -> TokenDetails:
        return TokenDetails(_sum(self.prompt, other.prompt), _sum(self.completion, other.completion))


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one exchange.

    Attributes:
        completion_tokens: generated, with the token that ends an answer.
        cached_tokens: of the prompt, found in a KV cache; None where nobody knows, or it was told before.
        details: as the server that answered tells them with the end of its answer; None where it tells none.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    details: TokenDetails | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def to_json(self) -> dict[str, object]:
        counts: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }
        prompt: Mapping[str, int] = {} if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}
        if self.details is not None:
            prompt = {**prompt, **self.details.prompt}
            if self.details.completion:
                counts["completion_tokens_details"] = self.details.completion
        if prompt:
            counts["prompt_tokens_details"] = prompt
        return counts


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


@dataclass(slots=True)
class SharedPrompt:
    """A prompt that several answers share: its tokens count once, and what a cache held of it with the first answer.

    Attributes:
        counted: tokens of it so far.
        asked: whether it was counted among the requests that got an answer.
    """

    counted: int = 0
    asked: bool = False

    def request(self) -> int:
        """Return how many requests one more answer to it adds: the first one's."""
        more, self.asked = int(not self.asked), True
        return more

    def part(self, used: Usage, *, first: bool) -> Usage:
        """Return what one of the answers adds, in whatever order they are asked for."""
        more = max(0, used.prompt_tokens - self.counted)
        self.counted += more
        details = used.details
        if details is not None and not first:
            details = TokenDetails({}, details.completion)
        return Usage(more, used.completion_tokens, used.cached_tokens if first else None, details)
