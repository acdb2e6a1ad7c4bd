"""What logits say of tokens: of those drawn, and of those of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from router.values.logprobs import DrawnToken


class RowLogprobs:
    """Log probabilities of some rows of logits, taken before the sampler changes those.

    Args:
        logits: float32 (rows, vocab), as the model computed them.
        wanted: request → its row, and how many alternatives are to be told; at least one.
    """

    def __init__(self, logits: torch.Tensor, wanted: Mapping[int, tuple[int, int]]) -> None:
        self._rows = {handle: place for place, handle in enumerate(wanted)}
        self._tops = {handle: min(top, logits.shape[-1]) for handle, (_, top) in wanted.items()}
        self._logprobs = torch.log_softmax(logits[[row for row, _ in wanted.values()]], dim=-1)

    def told(self, handle: int, token: int) -> tuple[DrawnToken, ...]:
        """Return what there is to tell of a token that was drawn from a request's row; nothing where none is wanted."""
        place = self._rows.get(handle)
        return () if place is None else (_drawn_token(self._logprobs[place], token, self._tops[handle]),)


def read_prompt(logits: torch.Tensor, start: int, prompt: Sequence[int], known: list[DrawnToken], top: int) -> None:
    """Add what the logits behind tokens of a prompt say of those that follow.

    Args:
        logits: float32 (tokens, vocab), behind the tokens from position `start` on.
        known: what is told of the beginning of the prompt; grows.
    """
    if not known:
        known.append(DrawnToken(prompt[0], None))
    fresh = slice(len(known) - 1 - start, len(prompt) - 1 - start)
    if fresh.start < 0:
        return
    for row in torch.log_softmax(logits[fresh], dim=-1):
        known.append(_drawn_token(row, prompt[len(known)], min(top, logits.shape[-1])))


def _drawn_token(logprobs: torch.Tensor, token: int, top: int) -> DrawnToken:
    if not top:
        return DrawnToken(token, logprobs[token].item())
    values, tokens = logprobs.topk(top)
    return DrawnToken(token, logprobs[token].item(), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
