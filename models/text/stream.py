"""A stream of token ids to a stream of text, which ends before a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from models.text.tokenizer import Tokenizer
from router.base.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a stream; once a stop string has completed, which is itself never part of the text, there is none.

    Attributes:
        tokens: how many of the ids it stands for: those behind the one that completed a stop string are not part of
            the answer.
        stop: the stop string that completed.
    """

    text: str
    tokens: int
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether one has."""
        return self.stop is not None


class TextStream:
    """Turns token ids into text as they come, with constant work a byte.

    The pieces, and `finish()` at last, join to `decode(all ids)` cut before the stop string that completes first (the
    longest of those that complete at the same character). Half a UTF-8 character, and text that may be the
    beginning of a stop string, wait for what follows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        prompt_tail: str = "",
        unwatched_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Start a stream.

        Args:
            stop: generation ends before the first of these.
            prompt_tail: text of this answer that was emitted before (a continuation); a stop string may begin in it.
            unwatched_tokens: no stop string is looked for in the text of so many ids.
            shown: special tokens that are text here, as they are written.

        Raises:
            InvalidRequest: a stop string is empty.
        """
        if not all(stop):
            raise InvalidRequest("`stop` holds an empty string; leave it out", param="stop")
        self._tokenizer, self._shown = tokenizer, shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._watches = [_Watch(text) for text in stop]
        self._held = ""
        self._stop: str | None = None
        self._unwatched_tokens = unwatched_tokens
        longest = max(map(len, stop), default=0)
        for character in prompt_tail[-longest:] if longest and not unwatched_tokens else "":
            for watch in self._watches:
                watch.advance(character)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Return the text that can be shown after these further ids; empty for ever once stopped."""
        if not self._watches:
            return TextDelta(self._utf8.decode(b"".join(map(self._piece, token_ids))), len(token_ids))
        shown, taken = "", 0
        for token_id in token_ids:  # one by one: which of them completes a stop string is what is counted up to
            if self._stop is not None:
                break
            text = self._utf8.decode(self._piece(token_id))
            free, self._unwatched_tokens = self._unwatched_tokens > 0, max(0, self._unwatched_tokens - 1)
            shown += text if free else self._take(text)
            taken += 1
        return TextDelta(shown, taken, self._stop)

    def finish(self) -> str:
        """Return what was still held back, at the end of a stream that met no stop string."""
        if self._stop is not None:
            return ""
        rest = self._take(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return rest + held if self._stop is None else rest

    def _piece(self, token_id: int) -> bytes:
        return (self._tokenizer.spelling if token_id in self._shown else self._tokenizer.piece)(token_id)

    def _take(self, text: str) -> str:
        before = len(self._held)
        self._held += text
        if not self._watches:
            held, self._held = self._held, ""
            return held
        for position, character in enumerate(text, before + 1):
            matched = [watch.text for watch in self._watches if watch.advance(character)]
            if matched:
                self._stop = max(matched, key=len)
                return self._held[: max(position - len(self._stop), 0)]
        keep = min(max(watch.state for watch in self._watches), len(self._held))
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


class _Watch:
    """Knuth, Morris and Pratt's automaton for one stop string.

    Attributes:
        state: length of the longest proper prefix of `text` that the stream ends with.
    """

    __slots__ = ("_borders", "state", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._borders = [0] * len(text)  # longest proper border of each prefix text[: i + 1]
        border = 0
        for index in range(1, len(text)):
            while border and text[index] != text[border]:
                border = self._borders[border - 1]
            border += text[index] == text[border]
            self._borders[index] = border

    def advance(self, character: str) -> bool:
        """Take one more character; true if the stop string is complete with it."""
        while self.state and character != self.text[self.state]:
            self.state = self._borders[self.state - 1]
        self.state += character == self.text[self.state]
        if self.state < len(self.text):
            return False
        self.state = self._borders[-1]
        return True
