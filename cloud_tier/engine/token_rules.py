"""What a request wants of single tokens: biases, the only ones allowed, and none that ends the answer too soon."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from router.values.sampling import SamplingParams


class TokenRules:
    """Changes the logits of one request before a token is drawn from them.

    Args:
        ending_ids: tokens that end the answer; banned for the first `params.min_tokens`.
    """

    def __init__(self, params: SamplingParams, ending_ids: Iterable[int], device: torch.device) -> None:
        def ids(tokens: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(tokens), dtype=torch.int64, device=device)

        self._biased = ids(token for token, _ in params.logit_bias)
        self._biases = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32, device=device)
        self._allowed = ids(params.allowed_token_ids)
        self._ending = ids(ending_ids)
        self._min_tokens = params.min_tokens

    @classmethod
    def of(cls, params: SamplingParams, ending_ids: Iterable[int], device: torch.device) -> TokenRules | None:
        """Return the rules of a request, None for one that has none."""
        if params.logit_bias or params.allowed_token_ids or params.min_tokens:
            return cls(params, ending_ids, device)
        return None

    def apply(self, logits: torch.Tensor, drawn: int) -> None:
        """Change the logits, float32 (vocab,), in place.

        Args:
            drawn: tokens drawn so far.
        """
        if len(self._allowed):
            kept = logits[self._allowed]
            logits.fill_(-torch.inf)
            logits[self._allowed] = kept
        if drawn < self._min_tokens:
            logits[self._ending] = -torch.inf
        if len(self._biased):
            logits[self._biased] += self._biases
