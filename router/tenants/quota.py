"""What one tenant may still ask for: its limits against what it took lately. Pure bookkeeping on the tier's clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from router.base.errors import BudgetSpent, RateLimited
from router.tenants.bucket import Bucket
from router.tenants.retries import RetryBudget
from router.tenants.tenant import Limits
from router.values.usage import Usage

_SLOT_S = 1.0  # until a place under a limit of concurrency may be free: nobody knows how long answers take


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of a limit a minute.

    Attributes:
        reset_s: until all of it is there again.
    """

    limit: int
    remaining: int
    reset_s: float


class Quota:
    """The state of one tenant; it outlives changes of the limits.

    Args:
        spent: tokens that the tenant has used this month.
        month_ends_s: seconds until the next month begins.

    Attributes:
        running: its requests in the tier.
        refused: by the code of the refusal, or what it was about.
    """

    def __init__(
        self, name: str, limits: Limits, spent: Callable[[], int], month_ends_s: Callable[[], float], now_s: float
    ) -> None:
        self.name = name
        self.limits = limits
        self.running = 0
        self.refused: Counter[str] = Counter()
        self.retries = RetryBudget()
        self._spent = spent
        self._month_ends_s = month_ends_s
        self._requests = _bucket(None, limits.requests_per_minute, now_s)
        self._tokens = _bucket(None, limits.tokens_per_minute, now_s)

    def reconfigure(self, limits: Limits, now_s: float) -> None:
        if limits is not self.limits:
            self.limits = limits
            self._requests = _bucket(self._requests, limits.requests_per_minute, now_s)
            self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now_s)

    def enter(self, now_s: float) -> None:
        """Take a place for a request, before anything of it is read; `leave` gives it back.

        Raises:
            BudgetSpent: the month's tokens are used up.
            RateLimited: too many requests at once, or a minute.
        """
        limits = self.limits
        budget = limits.monthly_tokens
        if budget is not None and (spent := self._spent()) >= budget:
            raise self._spent_up(f"tenant `{self.name}` has used {spent} of its {budget} tokens of this month")
        if limits.concurrency is not None and self.running >= limits.concurrency:
            raise self._limited(
                "concurrency",
                f"tenant `{self.name}` has {self.running} requests running, at most {limits.concurrency} may at once",
                _SLOT_S,
            )
        if self._requests is not None:
            wait_s = self._requests.wait_s(now_s, 1)
            if wait_s > 0:
                most = self._requests.limit
                raise self._limited("requests", f"tenant `{self.name}` may send {most} requests a minute", wait_s)
            self._requests.take(now_s, 1)
        self.running += 1

    def give_back(self, now_s: float) -> None:
        """A request that entered was refused, and not for a limit of this tenant: it counts for no minute."""
        if self._requests is not None:
            self._requests.take(now_s, -1)

    def reserve(self, now_s: float, prompt_tokens: int, answer_tokens: int, *, asked: bool) -> int:
        """Set tokens aside for a request; returns how many. `settle` puts what was really used in their place.

        Args:
            answer_tokens: that the answer may get.
            asked: the caller set that bound; without one, an answer takes what is left rather than be refused.

        Raises:
            RateLimited: too many tokens a minute. Where no minute holds them, a retry cannot help.
        """
        bucket = self._tokens
        if bucket is None:
            return 0
        wanted = prompt_tokens + answer_tokens
        if not asked:
            wanted = max(prompt_tokens + 1, min(wanted, bucket.limit))
        if wanted > bucket.limit:
            raise self._limited(
                "tokens",
                f"the request asks for {wanted} tokens ({prompt_tokens} of the prompt and up to {answer_tokens} of the "
                f"answer), and tenant `{self.name}` may use {bucket.limit} a minute: shorten it, or lower max_tokens",
                _SLOT_S,
                hopeless=True,
            )
        wait_s = bucket.wait_s(now_s, wanted)
        if wait_s > 0:
            raise self._limited(
                "tokens",
                f"tenant `{self.name}` may use {bucket.limit} tokens a minute: {max(0, int(bucket.left(now_s)))} are "
                f"left, and the request asks for {wanted}",
                wait_s,
            )
        bucket.take(now_s, wanted)
        return wanted

    def settle(self, now_s: float, reserved: int, used: Usage) -> None:
        """Count what a request really used; without a reservation, that alone."""
        if self._tokens is not None:
            self._tokens.take(now_s, used.total_tokens - reserved)

    def leave(self) -> None:
        self.running -= 1

    def left(self, now_s: float) -> tuple[Left | None, Left | None]:
        """What is left of requests and of tokens a minute; None where there is no such limit."""
        return _left(self._requests, now_s), _left(self._tokens, now_s)

    def _limited(self, what: str, message: str, wait_s: float, *, hopeless: bool = False) -> RateLimited:
        self.refused[what] += 1
        return RateLimited(message, retry_after_s=wait_s, what=what, hopeless=hopeless)

    def _spent_up(self, message: str) -> BudgetSpent:
        self.refused["budget"] += 1
        return BudgetSpent(message, retry_after_s=self._month_ends_s())


def _bucket(present: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
    if limit is None:
        return None
    if present is None:
        return Bucket(limit, now_s)
    present.resize(now_s, limit)
    return present


def _left(bucket: Bucket | None, now_s: float) -> Left | None:
    if bucket is None:
        return None
    return Left(bucket.limit, max(0, math.floor(bucket.left(now_s))), bucket.wait_s(now_s, bucket.limit))
