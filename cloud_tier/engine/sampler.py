"""Draw the next token of every sequence of a step, vectorised over the batch.

A row depends on nothing but its own logits, parameters, history and random numbers: each request has a generator of
its own and consumes exactly one uniform number a token, and some more under a constraint, so its draws are the same in
any company. Order, as in vLLM: rules for single tokens; repetition, frequency and presence penalties; temperature;
min-p; top-k; top-p over what top-k left; draw by inverting the cumulative distribution.

Under a constraint, tokens are proposed as if there was none, and the first one that is allowed is taken; where none is,
one is drawn from those that are. Greedily that is the likeliest of the allowed ones, and drawn at random, each of them
comes as often as if the others had been taken away before (rejection sampling, ended by its exact answer).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from cloud_tier.engine.token_rules import TokenRules
from router.values.sampling import SamplingParams

_NUCLEUS_CANDIDATES = 512  # sorting a whole vocabulary costs milliseconds a row; few nuclei are wider than this
PROPOSED = 4  # tokens under a constraint: to ask about one costs microseconds, to know all that are allowed hundreds
_COLDEST = 1e-5  # below it the division overflows; the draw is greedy long before


@dataclass(slots=True)
class SamplerState:
    """What one request needs between draws.

    Attributes:
        params: the request's.
        generator: source of its uniform numbers (always on the CPU), None for greedy requests.
        seen: bool (vocab,), tokens of prompt and answer; None unless the repetition penalty is on.
        counts: float32 (vocab,), occurrences in the answer; None unless presence or frequency penalty is on.
        rules: what the request wants of single tokens, None for nothing.
        drawn: tokens of the answer so far.
    """

    params: SamplingParams
    generator: torch.Generator | None = None
    seen: torch.Tensor | None = field(default=None, repr=False)
    counts: torch.Tensor | None = field(default=None, repr=False)
    rules: TokenRules | None = field(default=None, repr=False)
    drawn: int = 0
    _numbers: tuple[float, ...] = ()

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        ending_ids: Iterable[int] = (),
    ) -> SamplerState:
        """Prepare the state of a new request; `ending_ids` end its answer."""
        state = cls(params, rules=TokenRules.of(params, ending_ids, device))
        if params.temperature > 0:
            state.generator = torch.Generator()
            # manual_seed takes 64 bits; any Python integer is a legal seed.
            state.generator.manual_seed((secrets.randbits(63) if params.seed is None else params.seed) % 2**63)
        if params.repetition_penalty != 1.0:
            state.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            state.seen[torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
        if params.presence_penalty or params.frequency_penalty:
            state.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        return state

    @property
    def follows_logits(self) -> bool:
        """Whether the next token is simply the likeliest, whatever came before, and nothing is told of it."""
        params, free = self.params, self.seen is None and self.counts is None and self.rules is None
        return params.temperature == 0 and params.logprobs is None and free

    @property
    def shapes(self) -> bool:
        """Whether `shape` changes its logits."""
        return self.rules is not None or self.seen is not None or self.counts is not None

    @property
    def proposes(self) -> bool:
        """Whether it draws before it is known which tokens are allowed.

        What top-k, top-p and min-p leave over depends on those.
        """
        return self.params.temperature == 0 or not (_filters(self.params) or self.params.min_p)

    def uniforms(self, count: int = 1) -> tuple[float, ...]:
        """Return the numbers in [0, 1) of the next token: the same ones until that token is noted."""
        if self.generator is None:
            return (0.0,) * count
        if len(self._numbers) < count:
            more = torch.rand(count - len(self._numbers), generator=self.generator)
            self._numbers = (*self._numbers, *more.tolist())
        return self._numbers[:count]

    def note(self, token: int) -> None:
        """Take a drawn token into the history."""
        self._numbers = ()
        self.drawn += 1
        if self.seen is not None:
            self.seen[token] = True
        if self.counts is not None:
            self.counts[token] += 1


@torch.inference_mode()
def shape(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Apply the rules for single tokens and the penalties of each row, float32 (rows, vocab), in place."""
    for row, state in enumerate(states):
        if state.rules is not None:
            state.rules.apply(logits[row], state.drawn)
    _penalise(logits, states)


@torch.inference_mode()
def propose(logits: torch.Tensor, states: Sequence[SamplerState], numbers: range = range(1)) -> list[list[int]]:
    """Draw tokens for each row, and note none of them: the likeliest, or one for each number that is asked for.

    Args:
        logits: float32 (rows, vocab), shaped; not changed.
        states: one a row.
        numbers: which of the numbers of the next token; rows with filters take the first one alone.
    """
    best = logits.argmax(dim=-1, keepdim=True)
    tokens: list[list[int]] = best.tolist()
    plain = [row for row, s in enumerate(states) if s.params.temperature > 0 and not _filters(s.params)]
    narrow = [row for row, s in enumerate(states) if s.params.temperature > 0 and _filters(s.params)]
    for rows, draw, count in ((plain, _draw_plain, len(numbers)), (narrow, _draw_filtered, 1)):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            chosen = [states[row].params for row in rows]
            wanted = slice(numbers.start, numbers.start + count)
            uniforms = logits.new_tensor([states[row].uniforms(wanted.stop)[wanted] for row in rows])
            temperatures = logits.new_tensor([max(p.temperature, _COLDEST) for p in chosen]).unsqueeze(1)
            scaled = _without_unlikely(logits[index] / temperatures, chosen)
            for row, drawn in zip(rows, draw(scaled, uniforms, chosen).tolist(), strict=True):
                tokens[row] = drawn
    return tokens


@torch.inference_mode()
def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[int]:
    """Draw one token a row.

    Args:
        logits: float32 (rows, vocab); overwritten.
        states: one a row; their generators advance and their histories take the drawn tokens.
    """
    shape(logits, states)
    tokens = [drawn[0] for drawn in propose(logits, states)]
    for state, token in zip(states, tokens, strict=True):
        state.note(token)
    return tokens


def _filters(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0


def _without_unlikely(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Mask what min-p leaves out of each row."""
    if not any(p.min_p for p in params):
        return scaled
    least = scaled.new_tensor([p.min_p for p in params]).log().unsqueeze(1) + scaled.amax(dim=-1, keepdim=True)
    return scaled.masked_fill(scaled < least, -torch.inf)


def _penalise(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Apply CTRL's repetition penalty and OpenAI's frequency and presence penalties in place."""
    repeating = [(row, s.seen, s.params.repetition_penalty) for row, s in enumerate(states) if s.seen is not None]
    if repeating:
        rows = torch.tensor([row for row, _, _ in repeating], device=logits.device)
        seen = torch.stack([seen for _, seen, _ in repeating])
        penalty = logits.new_tensor([value for _, _, value in repeating]).unsqueeze(1)
        part = logits[rows]
        logits[rows] = torch.where(seen, torch.where(part > 0, part / penalty, part * penalty), part)
    counted = [(row, s.counts, s.params) for row, s in enumerate(states) if s.counts is not None]
    if counted:
        rows = torch.tensor([row for row, _, _ in counted], device=logits.device)
        counts = torch.stack([counts for _, counts, _ in counted])
        frequency = logits.new_tensor([params.frequency_penalty for _, _, params in counted]).unsqueeze(1)
        presence = logits.new_tensor([params.presence_penalty for _, _, params in counted]).unsqueeze(1)
        logits[rows] -= frequency * counts + presence * (counts > 0)


def _draw_plain(scaled: torch.Tensor, uniforms: torch.Tensor, _: Sequence[SamplingParams]) -> torch.Tensor:
    return _invert(torch.softmax(scaled, dim=-1), uniforms)


def _draw_filtered(scaled: torch.Tensor, uniforms: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Draw from the top-k, top-p part of each row: (rows, vocab), (rows, n) → (rows, n)."""
    vocab_size = scaled.shape[-1]
    top_k = torch.tensor([min(p.top_k, vocab_size) or vocab_size for p in params], device=scaled.device)
    top_p = scaled.new_tensor([p.top_p for p in params])
    drawn, complete = _draw_among(scaled, min(_NUCLEUS_CANDIDATES, vocab_size), uniforms, top_k, top_p)
    wide = (~complete).nonzero().squeeze(1)
    if len(wide):
        drawn[wide], _ = _draw_among(scaled[wide], vocab_size, uniforms[wide], top_k[wide], top_p[wide])
    return drawn


def _draw_among(
    scaled: torch.Tensor, candidates: int, uniforms: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw with only the likeliest `candidates` tokens sorted; also tell for which rows those were enough."""
    values, tokens = scaled.topk(candidates, dim=-1)
    position = torch.arange(candidates, device=scaled.device)
    within_k = position < top_k.unsqueeze(1)
    # Mass of everything top-k keeps: all of the row when top-k is off or wider than the candidates (then not complete).
    every = torch.where(
        top_k < scaled.shape[-1],
        values.masked_fill(~within_k, -torch.inf).logsumexp(dim=-1),
        scaled.logsumexp(dim=-1),
    )
    probabilities = (values - every.unsqueeze(1)).exp().masked_fill(~within_k, 0.0)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < top_p.unsqueeze(1)) & within_k
    kept[:, 0] = True
    complete = (top_k <= candidates) | ((top_k >= scaled.shape[-1]) & ~kept[:, -1])
    index = _invert(probabilities.masked_fill(~kept, 0.0), uniforms)
    return tokens.gather(1, index), complete


def _invert(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert each row's cumulative distribution (unnormalised) at its numbers: (rows, n), (rows, m) → (rows, m)."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    index = torch.searchsorted(cumulative, uniforms * total, right=True)
    # Rounding may land the target on the total itself: then the last token that has any mass is meant.
    last = (cumulative < total).sum(dim=-1, keepdim=True)
    return torch.minimum(index, last)
