"""What a replica holds of a prompt already, and so need not compute: an estimate, learnt from where prompts went.

A prompt is cut into blocks of token ids. A block is known by a hash chained over all before it and over whose caches it
may be found in, so two prompts share exactly the blocks of their common beginning. Where an answer came from, its
prompt's blocks are noted, and behind the last of them how the prompt ended and how long the answer was: the next turn
of that chat has both. Without token ids, a session that grows stands for them.

How much of that is really there is learnt from what replicas tell with the first token (`TokenChunk.cached_tokens`): a
share of what was expected, by the age of the note, since caches make room for others. One that never tells is expected
to hold nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TypeVar

from router.base.clock import Clock, MonotonicClock
from router.values.prompt import EncodedPrompt
from router.values.request import InferenceRequest
from router.values.task import Task

BLOCK_TOKENS = 32
_MOST_BLOCKS = 512  # of one prompt: what is behind them is not counted
_BLOCKS = 16_384  # of one replica; the longest unused ones are forgotten
_HOLDERS = 262_144
_SESSIONS = 4_096
_REMEMBERED = 2_048  # prompts whose hashes are kept between two decisions, of requests in the tier
_ENDINGS = 4  # of prompts that share all whole blocks

_AGES_S = (10.0, 60.0, 300.0, 1800.0)
_SHARES = (1.0, 1.0, 0.8, 0.5, 0.2)  # of what was noted that is still there, before anything was told
_GAIN = 0.2

Key = TypeVar("Key")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Ending:
    """A prompt behind its last whole block, and the answer that followed.

    Attributes:
        key: hash of the prompt's rest, chained like a block.
        rest_tokens: length of that rest.
    """

    key: int
    rest_tokens: int
    answer_tokens: int


@dataclass(slots=True)
class _Block:
    """A block that a replica held at `at_s`, and prompts that ended behind it, the newest first."""

    at_s: float
    endings: tuple[_Ending, ...] = ()


@dataclass(slots=True)
class _Session:
    """What a session's last exchange had."""

    prompt_tokens: int
    answer_tokens: int
    at_s: float


@dataclass(slots=True)
class _Holdings:
    """What one replica holds, as far as is known here.

    Attributes:
        blocks: by hash. Of one prompt the beginning is always the more recently used, so what is left is a beginning.
        version: counts notes, so that what was found before the last one is looked up again.
        shares: by age of a note, for answers that are drawn anew and for repeatable ones, which may find less.
    """

    blocks: OrderedDict[int, _Block] = field(default_factory=OrderedDict)
    sessions: OrderedDict[tuple[str, str], _Session] = field(default_factory=OrderedDict)
    version: int = 0
    shares: tuple[list[float], list[float]] = field(default_factory=lambda: (list(_SHARES), list(_SHARES)))

    def share(self, request: InferenceRequest, age_s: float) -> float:
        return self.shares[request.sampling.repeatable][_bucket(age_s)]

    def learn(self, request: InferenceRequest, age_s: float, share: float) -> None:
        shares, bucket = self.shares[request.sampling.repeatable], _bucket(age_s)
        shares[bucket] += _GAIN * (share - shares[bucket])


@dataclass(frozen=True, slots=True)
class _Chain:
    """The hashes of a prompt's whole blocks, the first one first.

    Attributes:
        root: what the chain begins with.
        found: by replica, what was noted there: the version of its notes, tokens, and when.
    """

    encoded: EncodedPrompt
    root: int
    keys: tuple[int, ...]
    found: dict[str, tuple[int, int, float]] = field(default_factory=dict)

    def ending_key(self, depth: int, rest_tokens: int) -> int:
        """Hash of the next `rest_tokens` ids behind the first `depth` blocks."""
        start = depth * BLOCK_TOKENS
        before = self.keys[depth - 1] if depth else self.root
        return hash((before, self.encoded.token_ids[start : start + rest_tokens]))


class Affinity:
    """What all replicas of a tier hold; one writer, the dispatcher. Bounded, whatever comes.

    Attributes:
        telling: replicas that have told of their cache; the others are expected to hold nothing.
        finds: keep what `holder` needs; only where replicas are too many to ask each.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._held: dict[str, _Holdings] = {}
        self.telling: set[str] = set()
        self.finds = False
        self._holders: OrderedDict[int, str] = OrderedDict()  # by hash of a block: who had it last
        self._untold: OrderedDict[str, tuple[int, float]] = OrderedDict()  # what was expected, by request: tokens, age
        self._chains: OrderedDict[str, _Chain] = OrderedDict()

    def expected_cached(self, request: InferenceRequest, replica_id: str) -> int:
        """Return how many tokens of the prompt the replica is expected to find in its cache: 0 to all but one."""
        if replica_id not in self.telling:
            return 0
        held = self._held[replica_id]
        chain = self._chain(request)
        found = chain.found.get(replica_id) if chain is not None else None
        if found is None or found[0] != held.version:
            found = (held.version, *_noted(request, chain, held))
            if chain is not None:
                chain.found[replica_id] = found
        _, tokens, at_s = found
        if not tokens:
            return 0
        share = held.share(request, self._clock.now_s() - at_s)
        return max(0, min(int(tokens * share), request.prompt_tokens - 1))

    def holder(self, request: InferenceRequest) -> str | None:
        """Return who had the longest known beginning of the prompt last, without asking each replica."""
        chain = self._chain(request) if self.finds else None
        depth = 0 if chain is None else _depth(chain, self._holders)
        return self._holders[chain.keys[depth - 1]] if chain is not None and depth else None

    def began(self, request: InferenceRequest, replica_id: str, cached_tokens: int | None, sent_at_s: float) -> None:
        """The first token came: learn from what the replica found, and note that it holds the prompt now.

        Calls leave nothing in a cache.

        Args:
            cached_tokens: as it told, None if it has not told yet.
            sent_at_s: what was noted since then could not be found.
        """
        if request.task is not Task.GENERATE:
            return
        held = self._held_by(replica_id)
        tokens, at_s = _noted(request, self._chain(request), held)
        if at_s <= sent_at_s:
            self._untold[request.request_id] = tokens, sent_at_s - at_s
            _trim(self._untold, _REMEMBERED)
        if cached_tokens is not None:
            self.told(request, replica_id, cached_tokens)
        self._note(request, replica_id, None)

    def told(self, request: InferenceRequest, replica_id: str, cached_tokens: int) -> None:
        """The replica has told how many tokens of the prompt it found; some tell at the end of the answer alone."""
        held = self._held_by(replica_id)
        self.telling.add(replica_id)
        tokens, age_s = self._untold.pop(request.request_id, (0, 0.0))
        if tokens >= BLOCK_TOKENS:
            held.learn(request, age_s, min(1.0, cached_tokens / tokens))

    def _held_by(self, replica_id: str) -> _Holdings:
        held = self._held.get(replica_id)
        if held is None:
            held = self._held[replica_id] = _Holdings()
        return held

    def ended(self, request: InferenceRequest, replica_id: str, answer_tokens: int) -> None:
        """A whole answer came, after `began`: the replica holds prompt and answer now."""
        held = self._held.get(replica_id)
        if held is not None:
            self._note(request, replica_id, answer_tokens)

    def left(self, request: InferenceRequest) -> None:
        """A request left the tier, whichever way: nothing of its prompt is kept but what replicas hold of it."""
        self._chains.pop(request.request_id, None)
        self._untold.pop(request.request_id, None)

    def keep_only(self, replica_ids: set[str]) -> None:
        """Forget replicas that are gone."""
        self.telling &= replica_ids
        for replica_id in self._held.keys() - replica_ids:
            del self._held[replica_id]

    def _note(self, request: InferenceRequest, replica_id: str, answer_tokens: int | None) -> None:
        held = self._held[replica_id]
        now_s, chain = self._clock.now_s(), self._chain(request)
        held.version += 1
        if chain is None:
            if request.objective.session is not None and answer_tokens is not None:
                held.sessions[request.cache_owner, request.objective.session] = _Session(
                    request.prompt_tokens, answer_tokens, now_s
                )
                _trim(held.sessions, _SESSIONS)
            return
        for key in reversed(chain.keys):  # the beginning last: it is forgotten last
            block = held.blocks.setdefault(key, _Block(now_s))
            block.at_s = now_s
            held.blocks.move_to_end(key)
            if self.finds:
                self._holders[key] = replica_id
                self._holders.move_to_end(key)
        _trim(self._holders, _HOLDERS)
        rest_tokens = len(chain.encoded.token_ids) - len(chain.keys) * BLOCK_TOKENS
        if chain.keys and rest_tokens < BLOCK_TOKENS and answer_tokens is not None:
            last = held.blocks[chain.keys[-1]]
            ending = _Ending(chain.ending_key(len(chain.keys), rest_tokens), rest_tokens, answer_tokens)
            others = (other for other in last.endings if other.key != ending.key)
            last.endings = (ending, *others)[:_ENDINGS]
        _trim(held.blocks, _BLOCKS)

    def _chain(self, request: InferenceRequest) -> _Chain | None:
        """Return the hashes of the prompt, None where its token ids are not known."""
        encoded = request.encoded
        if encoded is None:
            return None
        known = self._chains.get(request.request_id)
        if known is not None and known.encoded is encoded:
            return known
        ids = encoded.token_ids
        root = parent = hash(request.cache_owner)
        keys: list[int] = []
        for start in range(0, min(len(ids) // BLOCK_TOKENS, _MOST_BLOCKS) * BLOCK_TOKENS, BLOCK_TOKENS):
            parent = hash((parent, ids[start : start + BLOCK_TOKENS]))
            keys.append(parent)
        chain = self._chains[request.request_id] = _Chain(encoded, root, tuple(keys))
        _trim(self._chains, _REMEMBERED)
        return chain


def _noted(request: InferenceRequest, chain: _Chain | None, held: _Holdings) -> tuple[int, float]:
    """Return how many leading tokens of the prompt were noted for a replica, and when the last of them was."""
    if chain is None:
        return _grown(request, held)
    depth = _depth(chain, held.blocks)
    if depth == 0:
        return 0, 0.0
    block = held.blocks[chain.keys[depth - 1]]
    tokens = depth * BLOCK_TOKENS
    for ending in block.endings:
        if ending.key == chain.ending_key(depth, ending.rest_tokens):
            tokens += ending.rest_tokens + ending.answer_tokens
            break
    return min(tokens, len(chain.encoded.token_ids) - 1), block.at_s


def _depth(chain: _Chain, blocks: Container[int]) -> int:
    """Return how many leading blocks of a prompt are known; those that are form a beginning, so bisection finds it."""
    low, high = 0, len(chain.keys)
    while low < high:
        middle = (low + high + 1) // 2
        if chain.keys[middle - 1] in blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _grown(request: InferenceRequest, held: _Holdings) -> tuple[int, float]:
    """What a session has left behind, where its prompt has grown since: one that has not is another conversation."""
    session = held.sessions.get((request.cache_owner, request.objective.session or ""))
    if session is None or request.prompt_tokens < session.prompt_tokens + session.answer_tokens:
        return 0, 0.0
    return min(session.prompt_tokens + session.answer_tokens, request.prompt_tokens - 1), session.at_s


def _bucket(age_s: float) -> int:
    return bisect_left(_AGES_S, age_s)


def _trim(table: OrderedDict[Key, Item], most: int) -> None:
    while len(table) > most:
        table.popitem(last=False)
