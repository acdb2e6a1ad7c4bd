"""One request inside the engine process: its tokens, how many are computed, and where their keys and values lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloud_tier.engine.speculation import NgramIndex
from router.values.chunk import FinishReason
from router.values.logprobs import DrawnToken

if TYPE_CHECKING:
    from cloud_tier.engine.kv_blocks import BlockTable
    from cloud_tier.engine.protocol import EngineRequest
    from cloud_tier.engine.sampler import SamplerState
    from models.text.guide import Guide


class Sequence:
    """A prompt and what was generated after it.

    Attributes:
        handle: the number the parent process knows the request by; grows with every request.
        tokens: prompt, then generated tokens.
        num_computed: leading tokens whose keys and values lie in the cache. A step catches this up to `len(tokens)`;
            when it does, the step draws the next token. There is no other difference between prefill and decode.
        blocks: the block table, None while the sequence waits.
        last_length: `len(tokens)` at which the sequence ends with `LENGTH`.
        preempted: it was running and lost its blocks; it goes to the head of its priority class.
        ngrams: where to find drafts.
        prompt_told: the log probabilities of the prompt's tokens so far, where they are asked for.
        ending_ids: tokens that end the answer and are no part of it.
        cached_tokens: tokens of the prompt that were found in the prefix cache, None before it was first admitted.
        guide: what may come behind its newest token; None where its answer need match nothing.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "ending_ids",
        "guide",
        "handle",
        "last_length",
        "ngrams",
        "num_computed",
        "preempted",
        "prompt_told",
        "request",
        "sampler",
        "tokens",
    )

    def __init__(
        self,
        handle: int,
        request: EngineRequest,
        context_tokens: int,
        sampler: SamplerState,
        guide: Guide | None = None,
    ) -> None:
        self.handle = handle
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.num_computed = 0
        self.blocks: BlockTable | None = None
        self.last_length = min(context_tokens, len(self.tokens) + request.max_tokens)
        self.preempted = False
        self.prompt_told: list[DrawnToken] = []
        self.cached_tokens: int | None = None
        self.sampler = sampler
        self.ending_ids = request.ending_ids
        self.guide = guide
        self.ngrams = NgramIndex()

    @property
    def scored(self) -> bool:
        """Whether the logits behind the next tokens are wanted because they belong to the prompt."""
        return self.request.sampling.prompt_logprobs and len(self.tokens) == len(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """Tokens not yet computed."""
        return len(self.tokens) - self.num_computed

    @property
    def yields(self) -> bool:
        """Whether it is held up for all others."""
        return self.request.yields

    @property
    def rank(self) -> tuple[int, bool, float, int]:
        """Sort key: the least is served first, the greatest is preempted first."""
        return (-self.request.priority, not self.preempted, self.request.arrival_s, self.handle)

    @property
    def prompt_remaining(self) -> int:
        """Prompt tokens not yet computed."""
        return max(0, len(self.request.prompt_ids) - self.num_computed)

    @property
    def tokens_to_generate(self) -> int:
        """Upper bound on tokens still to be drawn."""
        return self.last_length - len(self.tokens)

    def append(self, token: int) -> FinishReason | None:
        """Take a drawn token; return why the sequence ends with it, if it does."""
        if token in self.ending_ids:
            return FinishReason.STOP
        self.tokens.append(token)
        return FinishReason.LENGTH if len(self.tokens) >= self.last_length else None
