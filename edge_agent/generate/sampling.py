"""Draws the next token from logits, in numpy; each request has its own generator, so the batch changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edge_agent.generate.token_rules import TokenRules
from models.text.guide import BIAS_OF_BYTE
from router.values.sampling import GREEDY_BELOW, SamplingParams

_NUCLEUS_GUESS = 512
_SEED_MASK = (1 << 64) - 1


class Sampler:
    """The sampling state of one request.

    Rules for single tokens first, then penalties, temperature, min-p, top-k and top-p, as in vLLM.

    Args:
        prompt_ids: counted by the repetition penalty, and by no other.
        rules: what the request wants of single tokens, None for nothing.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, rules: TokenRules | None = None
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        seed = None if params.seed is None else params.seed & _SEED_MASK
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._rules = rules
        self._drawn = 0
        self._counts: dict[int, int] = {}
        self._seen: set[int] = set(prompt_ids) if params.repetition_penalty != 1.0 else set()
        self._penalised = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )

    def draw(self, logits: npt.NDArray[np.float32], mask: npt.NDArray[np.uint8] | None = None) -> int:
        """Return the next token.

        Args:
            logits: float32 (vocab,); not changed.
            mask: uint8 (ceil(vocab / 8),): the tokens that may be drawn, a bit each, the lowest one first; None
                allows all.

        Raises:
            ArithmeticError: a logit is not finite, so the model's output is worthless.
        """
        finite = np.isfinite(logits)
        if not finite.all():
            token = int(np.argmin(finite))
            raise ArithmeticError(f"logit of token {token} is {logits[token]}: the runtime computed no usable output")
        if self._rules is not None:
            logits = self._rules.applied(logits, self._drawn)
        if self._penalised:
            logits = self._with_penalties(logits)
        if mask is not None:
            logits = logits + BIAS_OF_BYTE.take(mask, axis=0).ravel()[: logits.size]
        best = int(np.argmax(logits))
        token = best if self._params.temperature < GREEDY_BELOW else self._draw_random(logits)
        self._drawn += 1
        if self._penalised:
            self._counts[token] = self._counts.get(token, 0) + 1
            self._seen.add(token)
        return token

    def _with_penalties(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        params = self._params
        logits = logits.copy()
        if params.repetition_penalty != 1.0 and self._seen:
            ids = np.fromiter((i for i in self._seen if i < self._vocab_size), np.int64)
            picked = logits[ids]
            # CTRL: divide what is positive and multiply what is negative, so that both become less likely
            logits[ids] = np.where(picked > 0, picked / params.repetition_penalty, picked * params.repetition_penalty)
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            ids = np.fromiter(self._counts, np.int64)
            counts = np.fromiter(self._counts.values(), np.float32)
            logits[ids] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        return logits

    def _draw_random(self, logits: npt.NDArray[np.float32]) -> int:
        """Draw from the renormalised head of the distribution, most likely first."""
        params = self._params
        scaled = logits.astype(np.float64) / params.temperature
        weights = np.exp(scaled - scaled.max())
        if params.min_p:
            weights[weights < params.min_p] = 0.0  # the likeliest token's weight is 1
        top_k = params.top_k if 0 < params.top_k < weights.size else weights.size
        if params.top_p >= 1.0 and top_k == weights.size:
            return self._pick(np.arange(weights.size), weights)
        order = _largest(weights, top_k if params.top_p >= 1.0 else min(top_k, _NUCLEUS_GUESS))
        if params.top_p < 1.0:
            # top-p counts within what top-k left over
            total = weights.sum() if top_k == weights.size else weights[_largest(weights, top_k)].sum()
            needed = params.top_p * total
            if order.size < top_k and weights[order].sum() < needed:
                order = _largest(weights, top_k)
            inside = int(np.searchsorted(np.cumsum(weights[order]), needed, side="left")) + 1
            order = order[:inside]
        return self._pick(order, weights[order])

    def _pick(self, ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]) -> int:
        edges = np.cumsum(weights)
        index = int(np.searchsorted(edges, self._random.random() * edges[-1], side="right"))
        return int(ids[min(index, ids.size - 1)])


def _largest(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest weights, largest first; of equal ones the lower id comes first."""
    if count < weights.size:
        ids = np.sort(np.argpartition(weights, weights.size - count)[weights.size - count :])
    else:
        ids = np.arange(weights.size)
    return ids[np.argsort(-weights[ids], kind="stable")].astype(np.int64)
