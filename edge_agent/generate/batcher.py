"""Who is computed next: continuous batching over a few KV slots, as pure bookkeeping without threads or models.

Requests wait by priority, then by arrival. A free slot admits the first of them; its prompt is computed in chunks, and
between two chunks everybody who is already answering gets `decode_steps_per_chunk` tokens, so that neither a long
prompt stops the running answers nor do running answers starve a prompt.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from edge_agent.generate.sampling import Sampler
from edge_agent.runtime.protocol import Logits
from models.text.grammar import Matcher
from models.text.guide import Guide


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of a batcher; see `hardware_profiles.loader.Serving`."""

    slots: int
    prefill_chunk_tokens: int
    decode_steps_per_chunk: int


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request while it is computed.

    Attributes:
        prompt_ids: the rendered prompt.
        max_tokens: the answer's cap, already cut to the window.
        caller: whose request it is.
        exact: its answer must not depend on what was kept of earlier ones.
        scored: the logits behind every token of its prompt are wanted: nothing of it comes from a cache.
        scored_tokens: of how many the runtime tells them in one step.
        matcher: what the answer has to match; None where nothing was asked for.
        guide: what may come behind its newest token, by that; None while waiting.
        late: the logits, float32 (1, vocab), that wait for their mask: it is not computed before they are drawn from.
        handle: the runtime's handle, None while waiting.
        cached_tokens: ids of the prompt that were in the KV cache when it was admitted.
        fed: ids in the KV cache.
        generated: ids drawn so far; the last one is not yet fed.
    """

    prompt_ids: list[int]
    max_tokens: int
    sampler: Sampler
    priority: int = 0
    caller: str = ""
    exact: bool = False
    scored: bool = False
    scored_tokens: int = 1
    matcher: Matcher | None = None
    guide: Guide | None = None
    late: Logits | None = None
    handle: int | None = None
    cached_tokens: int = 0
    fed: int = 0
    generated: list[int] = field(default_factory=list)

    @property
    def prefill_tokens_left(self) -> int:
        return max(0, len(self.prompt_ids) - self.fed)

    @property
    def decode_tokens_left(self) -> int:
        return max(0, self.max_tokens - len(self.generated))


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Feed the next `token_ids` of a prompt; `last` asks for logits, and a scored one for those of every token."""

    sequence: Sequence
    token_ids: list[int]
    last: bool


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Feed each sequence its last drawn token."""

    sequences: tuple[Sequence, ...]


class Batcher:
    """Holds every sequence from its arrival until `remove`."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._decode_credit = 0

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=lambda item: -item.priority)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; unknown ones are ignored."""
        for group in (self._waiting, self._prefilling, self._decoding):
            if sequence in group:
                group.remove(sequence)

    def admit(self) -> Sequence | None:
        """Move the next waiting sequence into a free slot and return it, None if there is no slot or nobody waits."""
        if not self._waiting or self.running >= self.limits.slots:
            return None
        sequence = self._waiting.pop(0)
        self._prefilling.append(sequence)
        return sequence

    def next_step(self) -> PrefillStep | DecodeStep | None:
        """Return what to compute now, None if nobody can be; the caller reports back with `fed`."""
        decoding = tuple(sequence for sequence in self._decoding if sequence.late is None)
        if self._prefilling and (not decoding or self._decode_credit <= 0):
            sequence = self._prefilling[0]
            most = self.limits.prefill_chunk_tokens
            if sequence.scored:  # the first token alone: see `Runtime.open`
                most = min(most, sequence.scored_tokens) if sequence.fed else 1
            end = min(sequence.fed + most, len(sequence.prompt_ids))
            return PrefillStep(sequence, sequence.prompt_ids[sequence.fed : end], end == len(sequence.prompt_ids))
        return DecodeStep(decoding) if decoding else None

    def fed(self, step: PrefillStep | DecodeStep) -> None:
        """Note that the runtime has taken in the ids of `step`."""
        if isinstance(step, DecodeStep):
            self._decode_credit -= 1
            for sequence in step.sequences:
                sequence.fed += 1
            return
        self._decode_credit = self.limits.decode_steps_per_chunk
        step.sequence.fed += len(step.token_ids)
        if step.last:
            self._prefilling.remove(step.sequence)
            self._decoding.append(step.sequence)
