"""Which KV caches of ended sequences are still there, and how much of one a new prompt can use. Bookkeeping alone.

The same position computed in a step of another shape differs in its last bits, and INT8 rounding makes that visible
now and then. What was computed in whole chunks of the prompt from its beginning is *exact*: a run that reuses nothing
has the same chunks, so the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_agent.runtime.kv_pack import Parked

LEAST_TOKENS = 16
"""A shorter common beginning is computed anew: that costs no more than looking after it."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class KeptCache:
    """What one sequence has left behind.

    Attributes:
        caller: whose it was; nobody else gets it, so that no one's timing tells of another's prompt.
        ids: the tokens that its positions stand for.
        first_chunk: position at which the chunks of its prompt began: behind the model's own prefix.
        exact_tokens: leading positions that are exact.
    """

    caller: str
    ids: Ids
    parked: Parked
    first_chunk: int
    exact_tokens: int

    def usable(self, wanted: Ids, chunk_tokens: int | None) -> int:
        """Return how many leading ids of `wanted` it holds; given the size of a chunk, those that are exact."""
        common = _common(self.ids, wanted)
        if chunk_tokens is None:
            return common
        chunks = (min(common, self.exact_tokens) - self.first_chunk) // chunk_tokens
        return self.first_chunk + chunks * chunk_tokens if chunks > 0 else 0


class KeptCaches:
    """All of a runtime, least recently used first."""

    def __init__(self) -> None:
        self._order: list[KeptCache] = []

    def __len__(self) -> int:
        return len(self._order)

    def longest(
        self, caller: str, token_ids: Sequence[int], chunk_tokens: int | None = None
    ) -> tuple[KeptCache, int] | None:
        """Return the cache of this caller that has most of the beginning of `token_ids`, and how many ids of it.

        Never all of `token_ids`: the logits after the last one are still to be computed. None below `LEAST_TOKENS`.

        Args:
            chunk_tokens: size of a chunk where only exact positions will do, None where all will.
        """
        wanted = np.asarray(token_ids, np.int64)[:-1]
        best, most = None, LEAST_TOKENS - 1
        for kept in self._order:
            if kept.caller == caller and (usable := kept.usable(wanted, chunk_tokens)) > most:
                best, most = kept, usable
        return None if best is None else (best, most)

    def add(self, kept: KeptCache) -> None:
        self._order.append(kept)

    def touch(self, kept: KeptCache) -> None:
        """Note that it was used now."""
        self._order.remove(kept)
        self._order.append(kept)

    def remove(self, kept: KeptCache) -> None:
        self._order.remove(kept)

    def oldest(self) -> KeptCache:
        return self._order[0]

    def within(self, caller: str, ids: Ids) -> list[KeptCache]:
        """Return those of this caller that hold nothing but a beginning of `ids`."""
        return [kept for kept in self._order if kept.caller == caller and _common(kept.ids, ids) == len(kept.ids)]

    def holds(self, caller: str, ids: Ids) -> KeptCache | None:
        """Return one of this caller that begins with all of `ids`."""
        found = (kept for kept in self._order if kept.caller == caller and _common(kept.ids, ids) == len(ids))
        return next(found, None)

    def clear(self) -> None:
        self._order.clear()


def _common(one: Ids, other: Ids) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if differs.size else length
