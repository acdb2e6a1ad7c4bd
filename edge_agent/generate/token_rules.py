"""What a request wants of single tokens: biases, the only ones allowed, and none that ends the answer too soon."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from router.values.sampling import SamplingParams

_NEVER = np.float32(-np.inf)


class TokenRules:
    """Changes the logits of one request before a token is drawn from them.

    Args:
        ending_ids: tokens that end the answer; banned for the next `min_tokens`.
        min_tokens: what is left of the request's.
    """

    def __init__(self, params: SamplingParams, ending_ids: Iterable[int], min_tokens: int) -> None:
        self._biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._allowed = np.array(params.allowed_token_ids, np.int64)
        self._ending = np.array(sorted(ending_ids), np.int64)
        self._min_tokens = min_tokens

    @classmethod
    def of(cls, params: SamplingParams, ending_ids: Iterable[int], min_tokens: int) -> TokenRules | None:
        """Return the rules of a request, None for one that has none."""
        if params.logit_bias or params.allowed_token_ids or min_tokens:
            return cls(params, ending_ids, min_tokens)
        return None

    def applied(self, logits: npt.NDArray[np.float32], drawn: int) -> npt.NDArray[np.float32]:
        """Return the logits after the rules; the argument is not changed.

        Args:
            logits: float32 (vocab,).
            drawn: tokens drawn so far.
        """
        if self._allowed.size:
            kept, logits = logits[self._allowed], np.full_like(logits, _NEVER)
            logits[self._allowed] = kept
        else:
            logits = logits.copy()
        if drawn < self._min_tokens:
            logits[self._ending] = _NEVER
        logits[self._biased] += self._biases
        return logits
