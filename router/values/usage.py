"""Tokens of one exchange, as its caller is told them and as they are counted against its limits: one truth."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one exchange.

    Attributes:
        completion_tokens: generated, with the token that ends an answer.
        cached_tokens: of the prompt, found in a KV cache; None where nobody knows, or it was told before.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def to_json(self) -> dict[str, object]:
        counts: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }
        if self.cached_tokens is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return counts


@dataclass(slots=True)
class SharedPrompt:
    """A prompt that several answers share: its tokens count once, and what a cache held of it with the first answer.

    Attributes:
        counted: tokens of it so far.
    """

    counted: int = 0

    def part(self, used: Usage, *, first: bool) -> Usage:
        """Return what one of the answers adds, in whatever order they are asked for."""
        more = max(0, used.prompt_tokens - self.counted)
        self.counted += more
        return Usage(more, used.completion_tokens, used.cached_tokens if first else None)
