"""Inputs on which the process of a stage ended, and who sends them: kept from ending it again and again for everybody.

Nobody else is computed while a process is begun anew, which may mean loading a model. What ends it is refused unread
from its second end on: the first may have been the machine's.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from router.base.errors import OverspillError, RefusedAlone, RequestFailed

_HOLDS_S = 600.0
_MOST_KEPT = 1024
_ENDS_OF_AN_INPUT = 2
_ENDS_OF_A_CALLER = 3  # whatever the inputs: another one is easily made


class ProcessEnded(Exception):
    """The process that computed a batch ended, or was ended, before it had the results."""


class SetApart:
    """What has ended the process of one stage lately. Called by the workers of the stage.

    Args:
        stage: its name, for messages.
        now_s: the time, on the pipeline's clock.
    """

    def __init__(self, stage: str, now_s: Callable[[], float]) -> None:
        self._stage = stage
        self._now_s = now_s
        self._lock = threading.Lock()
        self._inputs = _Ends(_ENDS_OF_AN_INPUT)
        self._callers = _Ends(_ENDS_OF_A_CALLER)

    def ended(self, caller: str, value: Any) -> None:
        """A process ended on this input alone; `caller` is empty where nobody tells callers apart."""
        now_s = self._now_s()
        with self._lock:
            self._inputs.note(_digest(value), now_s)
            if caller:
                self._callers.note(caller.encode(), now_s)

    def refusal(self, caller: str, value: Any) -> OverspillError | None:
        """Return what to tell who sent an input that is not to be computed now, None where it is."""
        if not self._inputs:
            return None
        with self._lock:
            since_s = self._now_s() - _HOLDS_S
            self._inputs.forget(since_s)
            self._callers.forget(since_s)
            if self._inputs.left_s(_digest(value), since_s) > 0:
                return RequestFailed(
                    f"stage {self._stage}: its process has ended on this input {_ENDS_OF_AN_INPUT} times: it is not "
                    f"computed again within {_HOLDS_S / 60:.0f} minutes; change it"
                )
            left_s = self._callers.left_s(caller.encode(), since_s)
        if left_s <= 0:
            return None
        return RefusedAlone(
            f"stage {self._stage}: its process has ended on {_ENDS_OF_A_CALLER} inputs of yours within "
            f"{_HOLDS_S / 60:.0f} minutes: nothing of yours is computed there until they are over",
            retry_after_s=left_s,
        )


class _Ends:
    """When something ended a process lately, the last times that matter, by what it was."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._at_s: OrderedDict[bytes, deque[float]] = OrderedDict()  # whose last end is the oldest comes first

    def __len__(self) -> int:
        return len(self._at_s)

    def note(self, key: bytes, now_s: float) -> None:
        self._at_s.setdefault(key, deque(maxlen=self._most)).append(now_s)
        self._at_s.move_to_end(key)
        if len(self._at_s) > _MOST_KEPT:
            self._at_s.popitem(last=False)

    def forget(self, before_s: float) -> None:
        """Forget what did so last before that."""
        while self._at_s and next(iter(self._at_s.values()))[-1] <= before_s:
            self._at_s.popitem(last=False)

    def left_s(self, key: bytes, since_s: float) -> float:
        """Return how long this has too many ends yet; 0 where it has fewer."""
        at_s = self._at_s.get(key)
        return max(0.0, at_s[0] - since_s) if at_s is not None and len(at_s) == self._most else 0.0


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), digest_size=16).digest()
