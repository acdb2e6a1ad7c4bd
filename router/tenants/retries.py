"""Requests that are sent again: which ones are, and whether a tenant's stay within its budget.

While a tier refuses, every refusal may come back as another request, and these are what keeps it overloaded. So each
new request earns a share of a retry, and retries that nobody earned go first where anybody has to wait.
"""

from __future__ import annotations

from collections import OrderedDict

_REMEMBERED_S = 120.0  # the longest wait that clients of OpenAI's API take from `retry-after`
_MOST_REMEMBERED = 4096
_MOST_EARNED = 20.0
_FIRST = 3.0  # a tenant that has just come may have retries too


class RetryBudget:
    """One tenant's.

    Attributes:
        seen, beyond: retries, and those that its requests had not earned.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[int, float] = OrderedDict()
        self._earned = _FIRST
        self.seen = 0
        self.beyond = 0

    def came(self, fingerprint: int, now_s: float, share: float, *, again: bool) -> bool:
        """Count a request; whether it is a retry that was not earned.

        Args:
            fingerprint: equal for requests that ask for the same.
            share: retries that each new request earns.
            again: the client says itself that it is a retry.
        """
        refused_s = self._refused.pop(fingerprint, None) if self._refused else None
        if not again and (refused_s is None or now_s - refused_s > _REMEMBERED_S):
            self._earned = min(_MOST_EARNED, self._earned + share)
            return False
        self.seen += 1
        if self._earned >= 1.0:
            self._earned -= 1.0
            return False
        self.beyond += 1
        return True

    def refused(self, fingerprint: int, now_s: float) -> None:
        """A request was told to come back later: if it does, it is a retry."""
        self._refused[fingerprint] = now_s
        self._refused.move_to_end(fingerprint)
        while self._refused and (
            len(self._refused) > _MOST_REMEMBERED or now_s - next(iter(self._refused.values())) > _REMEMBERED_S
        ):
            self._refused.popitem(last=False)
