"""Draws the next token from logits, in numpy; each request has its own generator, so the batch changes nothing.

Under a constraint, tokens are proposed as if there was none, and the first one that is allowed is taken; where none is,
one is drawn from those that are. Greedily that is the likeliest of the allowed ones, and drawn at random, each of them
comes as often as if the others had been taken away before (rejection sampling, ended by its exact answer).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_agent.generate.token_rules import TokenRules
from models.text.guide import BIAS_OF_BYTE
from router.base.errors import RequestFailed
from router.values.sampling import GREEDY_BELOW, SamplingParams

_NUCLEUS_GUESS = 512
_BLOCK = 128
_PROPOSED = 4  # tokens: each costs some microseconds, to know all that are allowed some hundred
_SEED_MASK = (1 << 64) - 1
_NEVER = np.float32(-np.inf)


class Choices(Protocol):
    """What a constraint allows next; see `models.text.guide.Guide`.

    Attributes:
        mask: uint8 (ceil(vocab / 8),): the tokens that may be drawn, a bit each, the lowest one first; None while they
            are not known.
        undecided: what would be drawn without a constraint is asked about whatever the sampling is.
    """

    mask: npt.NDArray[np.uint8] | None
    undecided: bool

    def allows(self, token: int) -> bool: ...


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
        self._numbers: list[float] = []
        self._drawn = 0
        self._counts: dict[int, int] = {}
        self._seen: set[int] = set(prompt_ids) if params.repetition_penalty != 1.0 else set()
        self._penalised = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )

    @property
    def proposes(self) -> bool:
        """Whether it draws before it is known which tokens are allowed.

        What top-k, top-p and min-p leave over depends on those.
        """
        params = self._params
        return self._greedy or not (params.min_p or params.top_k or params.top_p < 1.0)

    def draw(self, logits: npt.NDArray[np.float32], choices: Choices | None = None) -> int | None:
        """Return the next token; None where no proposed one is allowed, and the others are not known.

        Draw again then, from the same logits, with a mask: the token is the one that would have come with it at first.

        Args:
            logits: float32 (vocab,); not changed.
            choices: which tokens are allowed; None allows all.

        Raises:
            ArithmeticError: a logit is not finite, so the model's output is worthless.
            RequestFailed: no allowed token is left by the rules of the request.
        """
        finite = np.isfinite(logits)
        if not finite.all():
            token = int(np.argmin(finite))
            raise ArithmeticError(f"logit of token {token} is {logits[token]}: the runtime computed no usable output")
        if self._rules is not None:
            logits = self._rules.applied(logits, self._drawn)
        if self._penalised:
            logits = self._with_penalties(logits)
        drawn = next(self._proposals(logits, 1)) if choices is None else self._allowed(logits, choices)
        if drawn is not None:
            self._note(drawn)
        return drawn

    @property
    def _greedy(self) -> bool:
        return self._params.temperature < GREEDY_BELOW

    def _allowed(self, logits: npt.NDArray[np.float32], choices: Choices) -> int | None:
        proposed = _PROPOSED if self.proposes else int(choices.undecided)
        for token in self._proposals(logits, proposed) if proposed else ():  # even none would weigh all tokens
            if choices.allows(token):
                return token
        if choices.mask is None:
            return None
        logits = logits + BIAS_OF_BYTE.take(choices.mask, axis=0).ravel()[: logits.size]
        if logits.max() == _NEVER:
            raise RequestFailed(
                "no token may come next in this answer: its constraint allows only such as `allowed_token_ids`, "
                "`logit_bias` or `min_tokens` forbid"
            )
        return next(self._proposals(logits, 1, proposed))

    def _proposals(self, logits: npt.NDArray[np.float32], most: int, first: int = 0) -> Iterator[int]:
        """Draw tokens by the numbers from `first` on: the likeliest in order, or independent ones."""
        if not self._greedy:
            yield from self._draw_random(logits, range(first, first + most))
            return
        best = int(np.argmax(logits))
        yield best
        if most > 1:
            logits = logits.copy()
        for _ in range(most - 1):
            logits[best] = _NEVER
            best = int(np.argmax(logits))
            if logits[best] > _NEVER:
                yield best

    def _number(self, index: int) -> float:
        """Return a number in [0, 1) of the next token: the same ones until that is drawn."""
        while len(self._numbers) <= index:
            self._numbers.append(self._random.random())
        return self._numbers[index]

    def _note(self, token: int) -> None:
        self._numbers.clear()
        self._drawn += 1
        if self._penalised:
            self._counts[token] = self._counts.get(token, 0) + 1
            self._seen.add(token)

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

    def _draw_random(self, logits: npt.NDArray[np.float32], numbers: Iterable[int]) -> Iterator[int]:
        """Draw from the renormalised head of the distribution, a token for each number."""
        params = self._params
        weights = logits - logits.max()
        weights /= np.float32(params.temperature)
        np.exp(weights, out=weights)
        if params.min_p:
            weights[weights < params.min_p] = 0.0  # the likeliest token's weight is 1
        top_k = params.top_k if 0 < params.top_k < weights.size else weights.size
        ids = None
        if params.top_p < 1.0 or top_k < weights.size:
            ids = _head(weights, top_k, params.top_p)
            weights = weights[ids]
        distribution = _Distribution(weights)
        for number in numbers:
            index = distribution.at(self._number(number))
            yield index if ids is None else int(ids[index])


class _Distribution:
    """Weights in a row, float32 (n,): their cumulative distribution, by blocks and within one."""

    def __init__(self, weights: npt.NDArray[np.float32]) -> None:
        self._weights = weights
        blocks = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64)
        self._edges = np.cumsum(blocks)

    def at(self, number: float) -> int:
        """Invert the distribution at a number in [0, 1); a weight of 0 is never met."""
        target = number * self._edges[-1]
        block = int(np.searchsorted(self._edges, target, side="right"))
        block = min(block, int(np.searchsorted(self._edges, self._edges[-1])))  # rounding may land on the total
        first = block * _BLOCK
        within = np.cumsum(self._weights[first : first + _BLOCK], dtype=np.float64)
        rest = target - (self._edges[block - 1] if block else 0.0)
        index = int(np.searchsorted(within, rest, side="right"))
        return first + min(index, int(np.searchsorted(within, within[-1])))


def _head(weights: npt.NDArray[np.float32], top_k: int, top_p: float) -> npt.NDArray[np.int64]:
    """Indices of what top-k, then top-p leave over, most likely first."""
    everything, least = weights.sum(dtype=np.float64), 0.0
    if top_k == weights.size:  # all that are no likelier add up to no more than what top-p leaves out
        least = (1 - top_p) * everything / weights.size
    near = np.flatnonzero(weights > least)
    weights = weights[near]
    if top_k < near.size:  # top-p counts within what top-k left over
        order = _largest(weights, top_k)
        everything = weights[order].sum(dtype=np.float64)
    else:
        order = _largest(weights, min(near.size, _NUCLEUS_GUESS))
        if top_p >= 1.0 or weights[order].sum(dtype=np.float64) < top_p * everything:
            order = _largest(weights, near.size)
    if top_p < 1.0:
        inside = np.searchsorted(np.cumsum(weights[order], dtype=np.float64), top_p * everything, side="left")
        order = order[: int(inside) + 1]
    return near[order]


def _largest(weights: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest weights, largest first; of equal ones the lower id comes first."""
    if count < weights.size:
        ids = np.sort(np.argpartition(weights, weights.size - count)[weights.size - count :])
    else:
        ids = np.arange(weights.size)
    return ids[np.argsort(-weights[ids], kind="stable")].astype(np.int64)
