"""Accounting of the KV cache in fixed blocks: who holds which, what may be shared, what may be taken.

A block holds the keys and values of `block_tokens` consecutive positions. A full block is known by a digest chained
over everything before it, so a later prompt with the same beginning shares it; freed blocks keep their content until
their room is needed (least recently used first). The chain begins with a salt: requests of other salts share nothing,
so that nobody's timing tells of another's prompt.

On a CPU, attention is several times faster over contiguous keys than over gathered pages. So the pool hands out blocks
in runs: a new sequence gets the start of a free window as long as it is likely to grow, and the rest of the window is
*softly reserved*: others take it only when nothing else is free. Attention then works on a handful of views.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_IN_USE = np.iinfo(np.int64).max
_RESERVED = _IN_USE - 1
_WAITED_FOR = 1 << 40  # added to the times at which such blocks are released


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in the order of its positions.

    Attributes:
        ids: block numbers.
        runs: the same as runs of consecutive blocks: (first block, number of blocks).
        digests: chained digests of the leading blocks that are full and registered.
        reserved: softly reserved block numbers `[start, end)` behind the last run.
        salt: what the chain of digests begins with.
    """

    ids: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    reserved: tuple[int, int] = (0, 0)
    salt: str = ""

    def append(self, block: int) -> None:
        """Add the next block."""
        self.ids.append(block)
        first, length = self.runs[-1] if self.runs else (-1, 0)
        if block == first + length and self.runs:
            self.runs[-1] = (first, length + 1)
        else:
            self.runs.append((block, 1))


class BlockPool:
    """All blocks of one engine. Every block is free or held by at least one table; `check` proves it."""

    def __init__(self, num_blocks: int, block_tokens: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._prefix_caching = prefix_caching
        self._holders = [0] * num_blocks
        self._num_free = num_blocks
        # What taking a block costs: 0 empty, the time of its release if cached, _RESERVED, or _IN_USE.
        self._cost: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        self._released = [0] * num_blocks
        self._time = 0
        self._by_digest: dict[bytes, int] = {}
        self._content: list[tuple[bytes, bytes, tuple[int, ...]] | None] = [None] * num_blocks
        self._distrusted: set[int] = set()
        self._to_zero: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return self._num_free

    @property
    def to_zero(self) -> list[int]:
        """Free blocks that hold what nobody may read: the next step overwrites them before it writes anything else."""
        return list(self._to_zero)

    def zeroed(self) -> None:
        """Note that the blocks of `to_zero` were overwritten."""
        self._to_zero.clear()

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def cached_prefix(self, tokens: Sequence[int], salt: str = "") -> list[tuple[int, bytes]]:
        """Return the blocks (and digests) already holding the beginning of `tokens`.

        Never all of them: at least the last token is left to compute, since its logits are needed.
        """
        found: list[tuple[int, bytes]] = []
        if not self._prefix_caching:
            return found
        parent = _root(salt)
        for start in range(0, (len(tokens) - 1) // self.block_tokens * self.block_tokens, self.block_tokens):
            ids = tuple(tokens[start : start + self.block_tokens])
            digest = _digest(parent, ids)
            block = self._by_digest.get(digest)
            if block is None or self._content[block] != (digest, parent, ids):
                break
            found.append((block, digest))
            parent = digest
        return found

    def open(self, prefix: list[tuple[int, bytes]], num_blocks: int, room: int, salt: str = "") -> BlockTable | None:
        """Return a table of `num_blocks` blocks beginning with the cached `prefix`, or None if they are not free.

        Args:
            room: how many blocks the sequence is likely to need in the end: reserved softly.
            salt: the one that `prefix` was found with.
        """
        revived = sum(1 for block, _ in prefix if self._holders[block] == 0)
        if num_blocks - len(prefix) > self._num_free - revived:
            return None
        table = BlockTable(salt=salt)
        for block, digest in prefix:
            self._hold(block)
            table.append(block)
            table.digests.append(digest)
        self._extend(table, num_blocks - len(prefix), max(room, num_blocks) - len(prefix))
        return table

    def grow(self, table: BlockTable, num_blocks: int, room: int) -> bool:
        """Extend the table to `num_blocks` blocks; return False, with nothing changed, if they are not free."""
        wanted = num_blocks - len(table.ids)
        if wanted <= 0:
            return True
        if wanted > self._num_free:
            return False
        self._extend(table, wanted, max(room, wanted))
        return True

    def close(self, table: BlockTable, *, in_slack: bool = False) -> None:
        """Give up every block of the table. Later positions are released first, so they are also taken first.

        Args:
            in_slack: it was computed in the slack: its blocks are taken before all that somebody waited for.
        """
        worth = 0 if in_slack else _WAITED_FOR
        self._unreserve(table)
        for block in reversed(table.ids):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._time += 1
                self._num_free += 1
                if block in self._distrusted:
                    self._distrusted.remove(block)
                    self._to_zero.append(block)
                self._released[block] = max(self._released[block], worth + self._time)
                self._cost[block] = self._released[block] if self._content[block] is not None else 0
        table.ids.clear()
        table.runs.clear()
        table.digests.clear()

    def register(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Make the table's blocks that are full by now known for sharing."""
        if not self._prefix_caching:
            return
        while (len(table.digests) + 1) * self.block_tokens <= num_computed:
            index = len(table.digests)
            parent = table.digests[-1] if table.digests else _root(table.salt)
            ids = tuple(tokens[index * self.block_tokens : (index + 1) * self.block_tokens])
            digest = _digest(parent, ids)
            table.digests.append(digest)
            if digest not in self._by_digest:
                block = table.ids[index]
                self._by_digest[digest] = block
                self._content[block] = (digest, parent, ids)

    def distrust(self, table: BlockTable) -> None:
        """Share the table's blocks, and what was computed after them, with nobody any more; zero them once free.

        A sequence that shares one of them now keeps it.
        """
        self._distrusted.update(table.ids)
        gone = {content[0] for block in table.ids if (content := self._content[block]) is not None}
        while gone:
            for digest in gone:
                self._forget(self._by_digest[digest])
            followers = (self._content[block] for block in self._by_digest.values())
            gone = {content[0] for content in followers if content is not None and content[1] in gone}

    def _forget(self, block: int) -> None:
        """Take a block out of what may be shared."""
        content = self._content[block]
        if content is not None:
            del self._by_digest[content[0]]
            self._content[block] = None
            if self._holders[block] == 0 and self._cost[block] != _RESERVED:
                self._cost[block] = 0

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Prove conservation against all open tables.

        Raises:
            AssertionError: a block is lost, held twice over, or free and held.
        """
        held = [0] * self.num_blocks
        for table in tables:
            for block in table.ids:
                held[block] += 1
        free = sum(1 for holders in held if holders == 0)
        if held != self._holders or free != self._num_free:
            raise AssertionError(
                f"KV blocks are not conserved: {held} held, {self._holders} counted, {self._num_free} free"
            )
        for block, holders in enumerate(held):
            if (self._cost[block] == _IN_USE) != (holders > 0):
                raise AssertionError(f"KV block {block} has {holders} holders and cost {self._cost[block]}")
        for digest, block in self._by_digest.items():
            content = self._content[block]
            if content is None or content[0] != digest:
                raise AssertionError(f"KV block {block} is known by a digest that is not its own")

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            self._num_free -= 1
        self._holders[block] += 1
        self._cost[block] = _IN_USE

    def _take(self, block: int) -> None:
        """Hold a free block for new content."""
        self._forget(block)
        self._released[block] = 0
        self._hold(block)

    def _extend(self, table: BlockTable, wanted: int, room: int) -> None:
        """Append `wanted` free blocks, in as few runs as the pool allows. There must be as many."""
        while wanted > 0:
            start, end = table.reserved
            if start == end or self._cost[start] == _IN_USE:
                self._unreserve(table)
                start, end = self._window(max(wanted, room))
                self._cost[start:end] = _RESERVED
            usable = 0
            while usable < wanted and start + usable < end and self._cost[start + usable] != _IN_USE:
                self._take(start + usable)
                table.append(start + usable)
                usable += 1
            table.reserved = (start + usable, end)
            wanted -= usable
            room -= usable

    def _unreserve(self, table: BlockTable) -> None:
        """Give the soft reservation back. Blocks of it that others took meanwhile are left alone."""
        start, end = table.reserved
        table.reserved = (0, 0)
        for block in range(start, end):
            if self._cost[block] == _RESERVED:
                self._cost[block] = self._released[block] if self._content[block] is not None else 0

    def _window(self, size: int) -> tuple[int, int]:
        """Return the free window of at most `size` blocks whose dearest block is the cheapest."""
        size = min(size, self.num_blocks)
        while True:
            stride = max(1, size // 4)
            windows = np.lib.stride_tricks.sliding_window_view(self._cost, size)[::stride]
            dearest = windows.max(axis=1)
            best = int(dearest.argmin())
            if dearest[best] < _RESERVED or (size == 1 and dearest[best] < _IN_USE):
                return best * stride, best * stride + size
            if size == 1:
                raise AssertionError("no free KV block, although the count says there is")
            size = max(1, size // 2)


def _root(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def _digest(parent: bytes, ids: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(parent + array("q", ids).tobytes(), digest_size=16).digest()
