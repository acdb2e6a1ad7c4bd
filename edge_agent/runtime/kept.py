"""Which KV caches of ended sequences are still there, and how much of one a new prompt can use. Bookkeeping alone."""

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
    """

    caller: str
    ids: Ids
    parked: Parked


class KeptCaches:
    """All of a runtime, least recently used first."""

    def __init__(self) -> None:
        self._order: list[KeptCache] = []

    def __len__(self) -> int:
        return len(self._order)

    def longest(self, caller: str, token_ids: Sequence[int]) -> tuple[KeptCache, int] | None:
        """Return the cache of this caller that has most of the beginning of `token_ids`, and how many ids of it.

        Never all of `token_ids`: the logits after the last one are still to be computed. None below `LEAST_TOKENS`.
        """
        wanted = np.asarray(token_ids, np.int64)[:-1]
        best, most = None, LEAST_TOKENS - 1
        for kept in self._order:
            if kept.caller == caller and (common := _common(kept.ids, wanted)) > most:
                best, most = kept, common
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
