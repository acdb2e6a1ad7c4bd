"""Log probabilities by token id into those of texts, told together with the text of their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from models.text.tokenizer import Tokenizer
from router.values.logprobs import Alternative, DrawnToken, TokenLogprob


class LogprobStream:
    """Holds the log probability of a token back until its text is shown.

    Half a character and what may be the beginning of a stop string wait in a `TextStream`; told too early, their
    tokens would be told twice by a replica that goes on with the text so far.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[tuple[int, DrawnToken]] = deque()  # with the byte of the answer at which each begins
        self._drawn_bytes = 0
        self._shown_bytes = 0

    def push(self, drawn: Iterable[DrawnToken]) -> None:
        """Take the next tokens of the answer."""
        for token in drawn:
            self._waiting.append((self._drawn_bytes, token))
            self._drawn_bytes += len(self._tokenizer.piece(token.token_id))

    def shown(self, text: str, *, whole: bool = False) -> tuple[TokenLogprob, ...]:
        """Return what belongs to the next text of the answer.

        Args:
            whole: the answer ends with it, and no stop string has cut it.
        """
        self._shown_bytes += len(text.encode("utf-8", "surrogatepass"))
        found = []
        while self._waiting and (whole or self._waiting[0][0] < self._shown_bytes):
            found.append(told(self._tokenizer, self._waiting.popleft()[1]))
        return tuple(found)

    def told(self, drawn: Iterable[DrawnToken]) -> tuple[TokenLogprob, ...]:
        """Return the same of tokens that are no part of the answer."""
        return tuple(told(self._tokenizer, token) for token in drawn)


def told(tokenizer: Tokenizer, drawn: DrawnToken) -> TokenLogprob:
    """Return a token and its alternatives with their texts."""
    raw = tokenizer.spelling(drawn.token_id)
    return TokenLogprob(
        text=raw.decode("utf-8", "replace"),
        logprob=drawn.logprob,
        raw=raw,
        shown=bool(tokenizer.piece(drawn.token_id)),
        top=tuple(_alternative(tokenizer, token, logprob) for token, logprob in drawn.top),
    )


def _alternative(tokenizer: Tokenizer, token_id: int, logprob: float) -> Alternative:
    raw = tokenizer.spelling(token_id)
    return Alternative(raw.decode("utf-8", "replace"), logprob, raw)
