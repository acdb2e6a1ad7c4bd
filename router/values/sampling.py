"""How the next token is drawn, and what that takes of a replica."""

from __future__ import annotations

import msgspec

from router.values.constraint import Constraint
from router.values.feature import FEATURE_OF, Feature

GREEDY_BELOW = 1e-5
"""A temperature below this takes the likeliest token."""


class SamplingParams(msgspec.Struct, frozen=True):
    """How the next token is drawn.

    Attributes:
        max_tokens: upper bound on generated tokens; None means up to the end of the context window.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all.
        seed: makes the draw reproducible on one replica and batch-independent.
        stop: generation ends before the first of these strings that appears and does not emit it.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens, in [-2, 2].
        repetition_penalty: CTRL's, over prompt and generated tokens; 1 is off.
        ignore_eos: keep generating past the end-of-turn token (load generators use it).
        min_p: keep tokens at least this times as likely as the likeliest, in [0, 1]; 0 keeps all.
        min_tokens: no end-of-turn token, stop token or stop string ends the answer before it has so many tokens.
        stop_token_ids: any of these ends the answer too and is not emitted, whatever `ignore_eos` says.
        logit_bias: (token id, what is added to its logit).
        allowed_token_ids: only these may be drawn; empty allows all.
        logprobs: how many alternatives are told beside the log probability of each token; None tells none at all.
        prompt_logprobs: the log probabilities of the prompt's tokens are told too.
        constraint: what the whole answer has to match; None leaves it free.
        bad_words: texts that the answer does not hold.
        reasoning_effort: how long a model that reasons may do so, in its server's words; nothing to any other.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    constraint: Constraint | None = None
    bad_words: tuple[str, ...] = ()
    reasoning_effort: str | None = None

    def needs(self) -> set[Feature]:
        """What a replica has to do beyond drawing by temperature and top-p up to a stop string."""
        asked = {
            Feature.TOP_K: self.top_k,
            Feature.PENALTIES: self.presence_penalty or self.frequency_penalty,
            Feature.REPETITION_PENALTY: self.repetition_penalty != 1.0,
            Feature.IGNORE_EOS: self.ignore_eos,
            Feature.SEED: self.seed is not None,
            Feature.MIN_P: self.min_p,
            Feature.MIN_TOKENS: self.min_tokens,
            Feature.STOP_IDS: self.stop_token_ids,
            Feature.LOGIT_BIAS: self.logit_bias,
            Feature.ALLOWED_IDS: self.allowed_token_ids,
            Feature.LOGPROBS: self.logprobs is not None,
            Feature.PROMPT_LOGPROBS: self.prompt_logprobs,
        }
        needs = {feature for feature, wanted in asked.items() if wanted}
        return needs if self.constraint is None else {*needs, FEATURE_OF[self.constraint.kind]}

    @property
    def repeatable(self) -> bool:
        """Whether the caller asked for an answer that comes out the same each time."""
        return self.temperature < GREEDY_BELOW or self.seed is not None
