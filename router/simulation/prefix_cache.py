"""What a simulated device keeps of prompts: whole KV blocks, chained, the longest unused forgotten first.

As vLLM's automatic prefix caching has it: a block is known by a hash over its tokens, all before it and whose cache it
is; at least one token of a prompt is always computed; sequences that run hold their room, and what they leave is cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16


class PrefixCache:
    """The KV room of one rung on one device.

    Args:
        room_tokens: for running sequences and cached blocks together.
    """

    def __init__(self, room_tokens: int) -> None:
        self._room_tokens = room_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._held = 0

    def __len__(self) -> int:
        """Blocks that are cached."""
        return len(self._blocks)

    def find(self, owner: str, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens of a prompt need not be computed, and use them."""
        found = 0
        keys = _keys(owner, token_ids[: len(token_ids) - 1])
        while found < len(keys) and keys[found] in self._blocks:
            found += 1
        self._use(keys[:found])
        return found * BLOCK_TOKENS

    def keep(self, owner: str, token_ids: Sequence[int]) -> None:
        """Keep all whole blocks of a sequence, as far as there is room."""
        self._use(_keys(owner, token_ids))
        self._make_room()

    def hold(self, tokens: int) -> None:
        """A sequence of up to so many tokens runs from now on; a negative number: it has ended."""
        self._held += tokens
        self._make_room()

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()

    def _use(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):  # the beginning last: it is forgotten last
            self._blocks[key] = None
            self._blocks.move_to_end(key)

    def _make_room(self) -> None:
        while self._blocks and len(self._blocks) * BLOCK_TOKENS + self._held > self._room_tokens:
            self._blocks.popitem(last=False)


def _keys(owner: str, token_ids: Sequence[int]) -> list[int]:
    """Return the chained hashes of a sequence's whole blocks."""
    parent, keys = hash(owner), []
    for start in range(0, len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        parent = hash((parent, tuple(token_ids[start : start + BLOCK_TOKENS])))
        keys.append(parent)
    return keys
