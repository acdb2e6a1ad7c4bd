"""Whether a stage is broken, or was given what it cannot compute: tried on an input that has passed it before.

What callers send says nothing of a stage that fails on it, however often it does: one of them may send nothing else.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any


class KnownGood:
    """The smallest input that has passed one stage, copied: it outlives the stage, which may be loaded anew.

    Where none has passed yet, the stage is loaded anew once, and not again before one has: that did not help.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._input: Any = None
        self._bytes = math.inf
        self._loaded_anew = False

    def passed(self, value: Any, size_bytes: int) -> None:
        """An input has passed; one of half the size takes the place of that which is kept."""
        if 2 * size_bytes > self._bytes or size_bytes == self._bytes:
            return
        kept = copy.deepcopy(value)  # arrays are views of a whole batch or body, which would be kept with them
        with self._lock:
            self._input, self._bytes, self._loaded_anew = kept, size_bytes, False

    def why_broken(self, work: Callable[[list[Any]], Sequence[Any]]) -> str:
        """Try the kept input. Return what it says of the stage, empty where that computes it as before."""
        with self._lock:
            known, value = self._bytes < math.inf, self._input
            first, self._loaded_anew = not self._loaded_anew, True
        if not known:
            return "and has computed no input yet" if first else ""
        try:
            results = list(work([value]))
        except BaseException:  # noqa: BLE001 - whoever wrote the function: `sys.exit` would end the worker alone
            broken = True
        else:
            broken = len(results) != 1 or isinstance(results[0], BaseException)
        return "and fails on an input that it has computed before" if broken else ""
