"""Hedging before the first token: a second replica is asked beside one whose first token is late, within a budget.

"The tail at scale" (Dean, Barroso, 2013) with three bounds more. The extra work is paid from a bucket into which each
request pays a share of its own; a second attempt goes only where it starts at once, on another device; and none goes
while anybody waits, since a second copy then costs somebody else the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Protocol

from router.base.errors import OverspillError
from router.base.timers import end
from router.dispatch.attempts.run import AttemptRun
from router.signals.in_flight import Attempt
from router.values.chunk import TokenChunk
from router.values.prediction import Prediction

# The bucket holds no more than so many device-seconds: a quiet day pays for no burst.
_MOST_S = 60.0
# A first token is not late before that, whatever was predicted: below, it is the machine's own jitter.
LEAST_WAIT_S = 0.05


class HedgeBudget:
    """A token bucket of device-seconds: requests pay in, hedges take out, so hedges stay a share of all work."""

    def __init__(self) -> None:
        self.left_s = 0.0

    def earn(self, cost_s: float, share: float) -> None:
        """Pay in for a request that costs `cost_s` device-seconds."""
        self.left_s = min(_MOST_S, self.left_s + share * cost_s)

    def spend(self, cost_s: float) -> bool:
        """Take `cost_s` out; returns False, and takes nothing, where that is not there."""
        if not 0.0 < cost_s <= self.left_s:
            return False
        self.left_s -= cost_s
        return True


def device_seconds(prediction: Prediction, answer_tokens: int) -> float:
    """What an attempt is predicted to cost its device, in seconds: its own prefill, and its share of the steps."""
    own_s = prediction.prefill_s + answer_tokens * prediction.token_device_s
    return own_s if own_s > 0 else prediction.finish_s - prediction.wait_s


class Hedger(Protocol):
    """The journey that an attempt is part of."""

    def second(self, late: Attempt) -> AttemptRun | None:
        """Return an attempt beside `late`, if one may be made now. It holds a slot."""
        ...

    def failed_beside(self, attempt: Attempt, error: OverspillError) -> None:
        """One of two attempts failed, and the other one goes on."""
        ...

    def hedge_decided(self, winner: Attempt, *, second: bool) -> None:
        """The first token has come, from `winner`; `second`: it is the attempt that was made later."""
        ...


class HedgedRun:
    """An attempt, and a second one beside it while its first token is late; from the first token on, one of them alone.

    Args:
        due_s: when the first token is late, on the tier's clock; infinity where the request is not to be hedged.

    Attributes:
        run: the attempt that the answer comes from, or the last one that failed.
    """

    def __init__(self, hedger: Hedger, first: AttemptRun, due_s: float) -> None:
        self._hedger = hedger
        self.run = first
        self._due_s = due_s
        self._open: list[AttemptRun] = []

    @property
    def ready(self) -> bool:
        """The next chunk is here already."""
        return self.run.stream.ready

    async def __aenter__(self) -> HedgedRun:
        await self._enter(self.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if len(self._open) == 1:
            await self.run.__aexit__(kind, error, trace)
            return
        async with contextlib.AsyncExitStack() as stack:
            for run in self._open:
                stack.push_async_exit(run)

    def receive(self) -> Coroutine[Any, Any, TokenChunk]:
        """Wait for the next chunk that the caller is to get; see `AttemptRun.receive`.

        Raises:
            OverspillError: the attempt failed, the second one too if there was one.
        """
        return self.run.receive() if self._due_s == math.inf else self._begin()

    async def _begin(self) -> TokenChunk:
        due_s, self._due_s = self._due_s, math.inf
        if not await self.run.begins(due_s):
            second = self._hedger.second(self.run.attempt)
            if second is not None:
                await self._enter(second)
                return await self._race(self.run, second)
        return await self.run.receive()

    async def _enter(self, run: AttemptRun) -> None:
        self._open.append(run)
        await run.__aenter__()

    async def _race(self, first: AttemptRun, second: AttemptRun) -> TokenChunk:
        """Return the first chunk of whichever has one first, and let go of the other."""
        tasks = {
            asyncio.create_task(run.first(), name=f"first token of {run.attempt.info.replica_id}"): run
            for run in (first, second)
        }
        running = dict(tasks)
        try:
            while True:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task.done()]:  # in their order: a tie is the first one's
                    self.run = running.pop(task)
                    error = task.exception()
                    if error is None:
                        self._decide(first, second)
                        return self.run.begin(task.result())
                    if not running or not isinstance(error, OverspillError):
                        self._hedger.hedge_decided(first.attempt, second=False)
                        raise error
                    self.run.let_go()
                    self._hedger.failed_beside(self.run.attempt, error)
        finally:
            await end(*tasks)

    def _decide(self, first: AttemptRun, second: AttemptRun) -> None:
        won = self.run is second
        loser = first if won else second
        loser.attempt.outrun = True
        loser.let_go()
        self._hedger.hedge_decided(self.run.attempt, second=won)
