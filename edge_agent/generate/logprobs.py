"""What logits say of tokens: of those drawn, and of those of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from router.values.chunk import TokenChunk
from router.values.logprobs import DrawnToken, TokenLogprob


class LogprobText(Protocol):
    """Log probabilities told with the text of their tokens; see `models.text.logprobs.LogprobStream`."""

    def push(self, drawn: Iterable[DrawnToken]) -> None: ...

    def shown(self, text: str, *, whole: bool = False) -> tuple[TokenLogprob, ...]: ...

    def told(self, drawn: Iterable[DrawnToken]) -> tuple[TokenLogprob, ...]: ...


@dataclass(slots=True)
class Logprobs:
    """The log probabilities of one request.

    Attributes:
        top: alternatives to tell beside each token.
        prompt: of the tokens of the prompt so far; None where they are not asked for.
    """

    top: int
    text: LogprobText
    prompt: list[DrawnToken] | None = None

    def draw(self, logits: npt.NDArray[np.float32], token_id: int) -> None:
        """Note a token that was drawn from `logits`, float32 (vocab,)."""
        self.text.push([drawn_token(logits, token_id, self.top)])

    def onto(self, chunk: TokenChunk, *, first: bool, cut: bool) -> TokenChunk:
        """Return the chunk with the log probabilities of what it shows, and the first one with those of the prompt.

        Args:
            cut: a stop string ends it: tokens behind its text are not told.
        """
        shown = self.text.shown(chunk.text, whole=chunk.finish_reason is not None and not cut)
        prompt = self.text.told(self.prompt) if first and self.prompt else ()
        return replace(chunk, logprobs=shown, prompt_logprobs=prompt)

    def read(self, prompt_ids: list[int], logits: npt.NDArray[np.float32]) -> None:
        """Note the tokens of the prompt that follow those of the rows of `logits`, float32 (tokens, vocab)."""
        if self.prompt is None:
            return
        if not self.prompt:
            self.prompt.append(DrawnToken(prompt_ids[0], None))
        for row in logits:
            if len(self.prompt) < len(prompt_ids):
                self.prompt.append(drawn_token(row, prompt_ids[len(self.prompt)], self.top))


def drawn_token(logits: npt.NDArray[np.float32], token_id: int, top: int) -> DrawnToken:
    """Return the log probability of a token, and of the `top` likeliest, best first.

    Args:
        logits: float32 (vocab,), as the model computed them.
    """
    highest = float(logits.max())
    total = highest + float(np.log(np.exp(logits - np.float32(highest)).sum(dtype=np.float64)))
    best: tuple[tuple[int, float], ...] = ()
    if top:
        count = min(top, logits.size)
        ids = np.argpartition(logits, logits.size - count)[logits.size - count :]
        ids = ids[np.lexsort((ids, -logits[ids]))]
        best = tuple((int(token), float(logits[token]) - total) for token in ids)
    return DrawnToken(token_id, float(logits[token_id]) - total, best)
