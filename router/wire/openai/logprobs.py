"""Log probabilities in OpenAI's two shapes: entries with bytes for chats, lists with offsets for completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from router.values.logprobs import Alternative, TokenLogprob


class LogprobEncoder:
    """Encodes those of one choice, piece by piece.

    Args:
        chat: in the shape of chats.
    """

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def encode(self, tokens: Iterable[TokenLogprob]) -> dict[str, object]:
        """Return the `logprobs` of a choice that shows these further tokens."""
        return {"content": [_entry(token) for token in tokens], "refusal": None} if self._chat else self._lists(tokens)

    def _lists(self, tokens: Iterable[TokenLogprob]) -> dict[str, object]:
        found: dict[str, list[object]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token in tokens:
            name = _name(token.text, token.raw)
            top: dict[str, float | None] = {_name(other.text, other.raw): other.logprob for other in token.top}
            if token.logprob is not None:
                top.setdefault(name, token.logprob)  # the one that came, whether it was likely or not
            found["tokens"].append(name)
            found["token_logprobs"].append(token.logprob)
            found["top_logprobs"].append(top if token.logprob is not None else None)
            found["text_offset"].append(self._offset)
            if token.shown:
                self._offset += len(token.text if token.raw is None else self._utf8.decode(token.raw))
        return {**found}


def _entry(token: TokenLogprob) -> dict[str, object]:
    return {**_alternative(token), "top_logprobs": [_alternative(other) for other in token.top]}


def _alternative(token: TokenLogprob | Alternative) -> dict[str, object]:
    raw = token.text.encode("utf-8", "replace") if token.raw is None else token.raw
    return {"token": token.text, "logprob": token.logprob, "bytes": list(raw)}


def _name(text: str, raw: bytes | None) -> str:
    """Return what a token is called in lists, which have no bytes: half a character is spelled out, as OpenAI does."""
    if raw is None or "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
