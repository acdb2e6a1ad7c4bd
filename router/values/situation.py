"""What a policy sees: one request, and every replica that may serve it with what that would cost."""

from __future__ import annotations

import math
from typing import Final

from router.base.structs import FrozenStruct
from router.values.length import LengthCurve
from router.values.prediction import Prediction
from router.values.replica import ReplicaInfo
from router.values.request import Objective
from router.values.settings import RouterSettings

_JOINED_BY: Final = 2.0  # newcomers a device, while an answer runs: it will not have been alone


class Candidate(FrozenStruct, frozen=True):
    """A replica that may serve the request, and what that would cost.

    Attributes:
        window_cap: longest answer its context window leaves, where the caller asked for more; None where all fits.
        session: it served the request's session before.
        price: of serving it there, in answers of full quality.
        idle: nothing runs on its device.
        slots: sequences that its device runs at once.
        load: sequences on its device and requests that wait for it, for each slot.
        peak_latency_s: peak-sensitive average of its response times.
        favoured: its device had better run this rung than another; two side by side slow each other.
        kv_short: its KV cache has no room for the prompt and the least answer now.
        longest_answer: in tokens, that its context window leaves.
        at_stake: what those who run on its device stand to lose by the prompt, were it to begin now, in answers.
    """

    info: ReplicaInfo
    prediction: Prediction
    window_cap: int | None = None
    session: bool = False
    price: float = 0.0
    idle: bool = False
    slots: int = 1
    load: float = 0.0
    peak_latency_s: float = 0.0
    favoured: bool = True
    kv_short: bool = False
    longest_answer: float = math.inf
    at_stake: float = 0.0


class Situation(FrozenStruct, frozen=True):
    """One request and the candidates that no hard constraint excludes. At least one.

    Attributes:
        objective: with the tier's default TTFT filled in. For the rest of a broken answer it holds no TTFT any more.
        ttft_promised: the caller asked for the TTFT itself, rather than getting the tier's default.
        now_s: on the tier's clock.
        waiting: requests in the tier's queue.
        longest_answer: in tokens, that the caller's cap and any candidate's window leave: no answer becomes longer.
        arrivals_per_s: newcomers lately; 0 before a few came, and where no device has a choice of rungs.
        caller_excess: how many times its equal share of device time the caller took lately.
        waited_s: accepted → now.
        wait_left_s: how much longer the request may wait for a free replica.
        best_quality: of any rung the request could ever be served by, healthy or not: what degraded is measured from.
        answer_tokens: expected length of what is left to generate, under the caller's own cap.
        length: the distribution of the whole answer's length, under the caller's own cap.
        open_ended: the caller set no cap of its own.
        emitted_tokens: what the caller already got from replicas that broke.
        answer_cap: cap forced by overload, None if the caller's own stands.
        pinned: the request names one exact variant.
        only_remote_fits: the device serves this model, but its windows are too short for the request.
        remote_served: replicas of the upstream serve the model, healthy or not.
        local_down, remote_down: none of that side is a candidate, because all failed, refused or are not available.
    """

    objective: Objective
    ttft_promised: bool
    waited_s: float
    wait_left_s: float
    candidates: tuple[Candidate, ...]
    best_quality: float
    answer_tokens: int
    open_ended: bool
    emitted_tokens: int
    answer_cap: int | None
    overloaded: bool
    pinned: bool
    only_remote_fits: bool
    remote_served: bool
    local_down: bool
    remote_down: bool
    settings: RouterSettings
    length: LengthCurve
    now_s: float
    waiting: int = 0
    caller_excess: float = 1.0
    arrivals_per_s: float = 0.0
    longest_answer: float = math.inf

    @property
    def calm(self) -> bool:
        """Whether nothing runs on any candidate's device, nobody else waits, and few come while the best rung answers.

        Under load a device is idle for a moment: an answer of the large rung that begins then would slow those of the
        small one that come after it, and they it.
        """
        if self.waiting > 1:
            return False
        for candidate in self.candidates:
            if not candidate.idle:
                return False
        if self.arrivals_per_s <= 0.0:
            return True
        best = self.candidates[0]
        for candidate in self.candidates:
            if candidate.info.quality > best.info.quality:
                best = candidate
        joined = self.arrivals_per_s * best.prediction.finish_s
        if joined < _JOINED_BY:
            return True
        return joined < _JOINED_BY * len({candidate.info.device_key for candidate in self.candidates})
