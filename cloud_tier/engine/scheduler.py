"""Which sequences compute how many tokens in the next step.

As in vLLM's second scheduler there are no phases: every sequence catches `num_computed` up to its length under one
token budget. Sequences one token short (decoding) come first, so that a prompt never starves them; then running ones
in the middle of their prompt; then waiting ones, while blocks last. When blocks run out, or when one of higher priority
waits, the sequence of the lowest priority that arrived last gives its own up and is computed again later.

Lines are held up while there are others, or for as long as they are told to: they keep their blocks until others need
these.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, replace
from operator import attrgetter

from cloud_tier.engine.drafts import Drafts
from cloud_tier.engine.kv_blocks import BlockPool
from cloud_tier.engine.sequence import Sequence
from cloud_tier.engine.speculation import Speculation

_GROWTH_TOKENS = 512  # room reserved softly behind a sequence, so that its keys stay in few runs
_SCORED_TOKENS = 64  # of one prompt in a step: the logits behind each are a vocabulary of floats
_WATERMARK = 0.01  # share of the blocks an admission leaves free for running sequences to grow


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence and how many of its next tokens the step computes.

    Attributes:
        draws: the step reaches its last token.
        draft: tokens computed behind that one, in case they are right.
        scored: the logits behind all of them are wanted, and none is a draft.
    """

    sequence: Sequence
    num_tokens: int
    draws: bool
    draft: tuple[int, ...] = ()
    scored: bool = False

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> Scheduled:
        return cls(sequence, num_tokens, num_tokens == sequence.remaining, scored=sequence.scored)

    @property
    def rows(self) -> int:
        """Tokens whose logits are needed."""
        if self.scored:
            return self.num_tokens
        return 1 + len(self.draft) if self.draws else 0


class Scheduler:
    """Waiting and running sequences of one engine, and their blocks.

    Attributes:
        lines_limit: see `Engine.limit_lines`.
    """

    def __init__(self, pool: BlockPool, *, max_running: int, token_budget: int) -> None:
        self._pool = pool
        self._max_running = max_running
        self._token_budget = token_budget
        self._watermark_blocks = max(1, int(pool.num_blocks * _WATERMARK))
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._released: list[int] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.lines_limit: int | None = None

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold blocks, best rank first."""
        return self._running

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that hold none, best rank first."""
        return self._waiting

    def take_released(self) -> list[int]:
        """Return the handles of the sequences that lost their blocks since the last call."""
        released, self._released = self._released, []
        return released

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        insort(self._waiting, sequence, key=attrgetter("rank"))

    def remove(self, sequence: Sequence, *, spoiled: bool = False) -> None:
        """Forget a sequence, finished or abandoned, and free its blocks.

        Args:
            spoiled: what its blocks hold must not be read again.
        """
        if spoiled and sequence.blocks is not None:
            self._pool.distrust(sequence.blocks)
        if sequence.blocks is None:
            self._waiting.remove(sequence)
        else:
            self._release(sequence)

    def blocks_of_lines(self) -> int:
        """Count the blocks that only lines hold: whoever else needs them gets them."""
        held: tuple[set[int], set[int]] = set(), set()
        for sequence in self._running:
            if sequence.blocks is not None:
                held[sequence.yields].update(sequence.blocks.ids)
        others, lines = held
        return len(lines - others)

    def schedule(self, prompt_limit: int) -> list[Scheduled]:
        """Plan one step. Empty only if nothing waits or runs, or all that does is held up.

        Args:
            prompt_limit: tokens of prompts in a step that others decode in, so that these need not wait for long; and
                in one of lines, of which little shall be lost if it is left.
        """
        plan: dict[int, Scheduled] = {}
        before = self.preemptions
        lines_left = self._lines_room()
        going_on = self._going_on(lines_left)
        lines_left -= sum(sequence.yields for sequence in going_on)
        decoding = [sequence for sequence in going_on if sequence.remaining == 1]
        prefilling = [sequence for sequence in going_on if sequence.remaining > 1]
        limit = prompt_limit if decoding or self._lines_alone else self._token_budget
        for sequence in decoding + prefilling:
            if sequence.blocks is None:  # preempted a moment ago
                continue
            num_tokens = self._tokens_now(sequence, plan, limit)
            if num_tokens > 0 and self._make_room(sequence, num_tokens, plan):
                plan[sequence.handle] = Scheduled.of(sequence, num_tokens)
        if self.preemptions == before:
            self._admit(plan, limit, lines_left)
        return list(plan.values())

    def with_drafts(
        self, plan: list[Scheduled], most: int, drafts: Drafts, speculation: Speculation
    ) -> list[Scheduled]:
        """Return the plan with drafts for its greedy sequences, if all of it decodes and the drafts are worth it."""
        if most == 0 or any(entry.num_tokens > 1 for entry in plan):
            return plan
        left = self._token_budget - len(plan)
        rooms: dict[int, int] = {}
        for entry in plan:
            sequence = entry.sequence
            allowed = min(most, left, sequence.tokens_to_generate - 1)
            if sequence.sampler.follows_logits and allowed > 0:
                rooms[sequence.handle] = room = drafts.room(sequence, allowed)
                left -= room
        total = sum(rooms.values())
        if total == 0 or not speculation.worth(len(plan), total):
            return plan
        asked = [(entry.sequence, rooms.get(entry.sequence.handle, 0)) for entry in plan]
        found = drafts.draft([(sequence, room) for sequence, room in asked if room and self._holds(sequence, room)])
        return [replace(entry, draft=found.get(entry.sequence.handle, ())) for entry in plan]

    def _holds(self, sequence: Sequence, drafted: int) -> bool:
        """Whether there are free blocks for so many tokens behind the newest, which it then has: it preempts nobody."""
        wanted = self._pool.blocks_for(sequence.num_computed + 1 + drafted)
        return sequence.blocks is not None and self._pool.grow(sequence.blocks, wanted, 0)

    def computed(self, entry: Scheduled, accepted: int = 0) -> None:
        """Note that the step of a plan has run: its keys and values lie in the cache, its full blocks may be shared.

        Args:
            accepted: drafted tokens that were right, and are part of the sequence by now.
        """
        sequence = entry.sequence
        sequence.num_computed += entry.num_tokens + accepted
        if sequence.blocks is not None:
            self._pool.register(sequence.blocks, sequence.tokens, sequence.num_computed)

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: dict[int, Scheduled]) -> bool:
        """Give a running sequence blocks for its next tokens; preempt until they are there. False: it went itself."""
        needed = self._pool.blocks_for(sequence.num_computed + num_tokens)
        while sequence.blocks is not None:
            if self._pool.grow(sequence.blocks, needed, self._room(sequence) - len(sequence.blocks.ids)):
                return True
            victim = self._running[-1]
            plan.pop(victim.handle, None)
            self._preempt(victim)
        return False

    def _preempt(self, victim: Sequence) -> None:
        self._release(victim)
        victim.num_computed = 0
        victim.preempted = True
        self.preemptions += 1
        self.add(victim)

    def _lines_room(self) -> float:
        """Return how many lines may be computed in the next step."""
        if self.lines_limit is not None:
            return self.lines_limit
        return math.inf if self._lines_alone else 0

    @property
    def _lines_alone(self) -> bool:
        """Whether lines are all there is: of those that run and of those that wait, they come last."""
        return all(queue[0].yields for queue in (self._running, self._waiting) if queue)

    def _going_on(self, lines: float) -> list[Sequence]:
        """Return those that run and are not held up: so many lines, and all others."""
        others = [sequence for sequence in self._running if not sequence.yields]
        return self._running[: len(others) + int(min(lines, len(self._running)))]

    def _admit(self, plan: dict[int, Scheduled], limit: int, lines_left: float) -> None:
        """Move waiting sequences to running, in order, while slots, blocks for the whole of each, and budget last.

        Where slots or blocks do not last, running sequences of lower priority give up theirs.
        """
        while self._waiting and self._left(plan, limit) > 0:
            sequence = self._waiting[0]
            if sequence.yields and lines_left < 1:
                return
            if not self._open(sequence):
                victim = self._running[-1] if self._running else None
                if victim is None or victim.request.priority >= sequence.request.priority:
                    return
                plan.pop(victim.handle, None)
                self._preempt(victim)
                continue
            lines_left -= sequence.yields
            plan[sequence.handle] = Scheduled.of(sequence, self._tokens_now(sequence, plan, limit))

    def _open(self, sequence: Sequence) -> bool:
        """Move the first waiting sequence to running, if there is a slot and there are blocks for the whole of it."""
        if len(self._running) >= self._max_running:
            return False
        owner = sequence.request.cache_owner
        scored = sequence.request.sampling.prompt_logprobs  # of what was computed before, nobody knows the logits
        prefix = [] if scored else self._pool.cached_prefix(sequence.tokens, owner)
        needed = self._pool.blocks_for(len(sequence.tokens))
        spare = self._watermark_blocks if self._running else 0
        if needed - len(prefix) + spare > self._pool.num_free:
            return False
        sequence.blocks = self._pool.open(prefix, needed, self._room(sequence), owner)
        if sequence.blocks is None:
            return False
        del self._waiting[0]
        sequence.num_computed = len(prefix) * self._pool.block_tokens
        self.prefix_hit_tokens += sequence.num_computed
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
        insort(self._running, sequence, key=attrgetter("rank"))
        return True

    def _tokens_now(self, sequence: Sequence, plan: dict[int, Scheduled], limit: int) -> int:
        wanted = min(sequence.remaining, _SCORED_TOKENS) if sequence.scored else sequence.remaining
        return min(wanted, self._left(plan, limit))

    def _left(self, plan: dict[int, Scheduled], limit: int) -> int:
        """Tokens that may still join the plan: of the budget, and of what prompts may have of it."""
        sizes = [entry.num_tokens for entry in plan.values()]
        return min(self._token_budget - sum(sizes), limit - sum(size for size in sizes if size > 1))

    def _release(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._released.append(sequence.handle)
        if sequence.blocks is not None:
            self._pool.close(sequence.blocks, in_slack=sequence.request.in_slack)
            sequence.blocks = None

    def _room(self, sequence: Sequence) -> int:
        """Blocks the sequence is likely to hold soon."""
        return self._pool.blocks_for(min(sequence.last_length, len(sequence.tokens) + _GROWTH_TOKENS))
