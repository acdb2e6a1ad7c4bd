"""What a request would cost on a replica, and what that is predicted from.

Made for every candidate of every decision: structs of msgspec take a tenth of the time of frozen dataclasses. What is
read far more often than made is a class with slots; see `router.base.structs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from router.base.structs import FrozenStruct
from router.values.replica import ReplicaInfo


class Demand(FrozenStruct, frozen=True):
    """What a request asks of a replica, in tokens and bytes still to process.

    Attributes:
        answer_tokens: expected length of the answer; answer_high_tokens: its 0.9 quantile, 0 where nobody knows.
        cached_tokens: of the prompt's, those the replica is expected to hold computed; see `router.signals.affinity`.
    """

    prompt_tokens: int
    answer_tokens: int
    prompt_bytes: int = 0
    cached_tokens: int = 0
    answer_high_tokens: int = 0


class Awaited(FrozenStruct, frozen=True):
    """A first text that a replica still owes.

    Attributes:
        sent_at_s: when its prompt was sent, on the tier's clock; high_s: within how many seconds it was told to come.
    """

    sent_at_s: float
    high_s: float

    def overdue(self, now_s: float) -> float:
        """Return how many times as long as told it has taken at least; 1 while it may yet be in time."""
        late = (now_s - self.sent_at_s) / self.high_s
        return late if late > 1.0 else 1.0  # noqa: FURB136 - asked for every candidate


@final
class InFlightLoad:
    """What this tier itself has sent to a replica and not seen the end of: known at once, without a report.

    Attributes:
        left_tokens: tokens each request is still expected to generate, ascending; found when they are asked for.
        unopened, unopened_prefill_tokens, unopened_decode_tokens: the part that no snapshot can show yet.
        awaited: the oldest first text that this tier's own replica owes, unless one sent later has come before it.
    """

    __slots__ = (
        "awaited",
        "left_tokens",
        "prefill_tokens",
        "requests",
        "unopened",
        "unopened_decode_tokens",
        "unopened_prefill_tokens",
    )

    def __init__(
        self,
        requests: int = 0,
        prefill_tokens: int = 0,
        left_tokens: Sequence[int] = (),
        *,
        unopened: int = 0,
        unopened_prefill_tokens: int = 0,
        unopened_decode_tokens: int = 0,
        awaited: Awaited | None = None,
    ) -> None:
        self.requests, self.prefill_tokens, self.left_tokens = requests, prefill_tokens, left_tokens
        self.unopened, self.unopened_prefill_tokens = unopened, unopened_prefill_tokens
        self.unopened_decode_tokens, self.awaited = unopened_decode_tokens, awaited


NOTHING_IN_FLIGHT = InFlightLoad()


class SiblingLoad(FrozenStruct, frozen=True):
    """Another rung of the same device that has sequences: it shares the device's slots and its time.

    Attributes:
        occupied: sequences it has, those queued inside it included.
        slots: sequences it would run at once, alone on the device.
        left_tokens: tokens each of this tier's requests there is still expected to generate, ascending.
        prefill_tokens: prompt tokens it has taken in and not computed; they come first.
        awaited: as in `InFlightLoad`.
    """

    info: ReplicaInfo
    occupied: int
    slots: int
    left_tokens: Sequence[int] = ()
    prefill_tokens: float = 0.0
    awaited: Awaited | None = None

    @property
    def running(self) -> int:
        """Sequences in its slots."""
        return min(self.occupied, self.slots)


class Prediction(FrozenStruct, frozen=True):
    """Seconds from now. `_high_s` is the figure expected to hold nine times in ten.

    Attributes:
        wait_s: until a slot of the device is free.
        tpot_s: seconds a token, the steps of all rungs that run on the device together.
        free: the replica can start at once.
        prefill_s: of its own prompt, alone on the device: no wait, no network, nothing queued before it.
        network_s: round trip and upload.
        token_device_s: device-seconds that one token costs at the device's full batch.
        ttft_log_sigma, pace_log_sigma: spread of log(actual / predicted), of prefill and of seconds a token.
        explore: so long ago, and so much avoided, that one request without a tight promise should try it.
    """

    wait_s: float
    ttft_s: float
    ttft_high_s: float
    tpot_s: float
    tpot_high_s: float
    finish_s: float
    finish_high_s: float
    free: bool
    prefill_s: float = 0.0
    network_s: float = 0.0
    token_device_s: float = 0.0
    ttft_log_sigma: float = 0.3
    pace_log_sigma: float = 0.3
    explore: bool = False

    @property
    def backlog_s(self) -> float:
        """Prefill of others that comes before its own, on a replica that is free."""
        backlog_s = self.ttft_s - self.wait_s - self.network_s - self.prefill_s
        return backlog_s if backlog_s > 0.0 else 0.0  # noqa: FURB136 - asked for every candidate

    def finish_with(self, answer_tokens: int) -> float:
        """`finish_s` for another answer length."""
        return self.ttft_s + max(answer_tokens - 1, 0) * self.tpot_s

    def finish_high_with(self, answer_tokens: int) -> float:
        """`finish_high_s` for another answer length."""
        return self.ttft_high_s + max(answer_tokens - 1, 0) * self.tpot_high_s


class TtftFeatures(FrozenStruct, frozen=True):
    """What a request found when it was sent, and what it was told then.

    Attributes:
        prefill_tokens: tokens to prefill before its first one, effective: queued ones and the batch's part included.
        network_s: the network's share of its TTFT; behind_s: that of prompts on other rungs of the device.
        prompt_tokens, cached_tokens: of its own prompt, and those expected to be cached.
        scale: effective tokens a token.
        band: of the device's occupancy, for the upper figures.
        told: the prediction at the moment of binding, None where none was made.
    """

    prefill_tokens: float
    network_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    scale: float = 1.0
    behind_s: float = 0.0
    band: int = 0
    told: Prediction | None = None
