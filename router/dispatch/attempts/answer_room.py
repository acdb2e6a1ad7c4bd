"""How much an answer may still grow: what a replica sends beyond its cap is cut off."""

from __future__ import annotations

from msgspec.structs import replace

from router.values.chunk import FinishReason, TokenChunk

_MAX_TOKEN_CHARS = 256  # no vocabulary holds a longer token


class AnswerRoom:
    """The tokens, and the characters that so many tokens can have, of one attempt.

    Args:
        tokens: the cap that the replica was sent, or what its window leaves.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._chars = tokens * _MAX_TOKEN_CHARS

    def take(self, chunks: list[TokenChunk]) -> bool:
        """Take chunks of text, where all of them have room and the answer may go on after them.

        Returns:
            Whether it did; without, it took none.
        """
        tokens = chars = 0
        for chunk in chunks:
            if not chunk.is_text:
                return False
            tokens += chunk.tokens
            chars += len(chunk.text) + len(chunk.reasoning)
        if tokens >= self._tokens or chars > self._chars:
            return False
        self._tokens -= tokens
        self._chars -= chars
        return True

    def fit(self, chunk: TokenChunk) -> tuple[TokenChunk, bool]:
        """Take a chunk; return what of it has room, and whether it went beyond: then that is the end of the answer."""
        shown = len(chunk.text) + len(chunk.reasoning)
        more = chunk.tokens > self._tokens or (self._tokens == 0 and shown and not chunk.finish_reason)
        if not more and shown <= self._chars:
            self._tokens -= chunk.tokens
            self._chars -= shown
            return chunk, False
        kept = min(self._chars, len(chunk.text) * self._tokens // max(chunk.tokens, 1))
        tokens = min(chunk.tokens, self._tokens)
        told = chunk.logprobs[:tokens]
        ends = FinishReason.LENGTH
        cut = replace(chunk, text=chunk.text[:kept], tokens=tokens, finish_reason=ends, logprobs=told, stop=None)
        return cut, True
