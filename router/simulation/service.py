"""What each request would cost on each rung, and when it may be served there: arrays for the bounds of a simulation.

Of a request of prompt m and answer n on a rung with `slots` places, with its own noise factors z_p and z_d (median 1):

    prefill    P = z_p · (fixed + m / prefill_tokens_per_s)    seconds, the device computes nothing else meanwhile
    alone      D = z_d · (n − 1) · step(1)                   seconds of decode, were nobody else there
    share      c = z_d · (n − 1) · min over b of step(b)/b   device-seconds of decode, at the batch that shares best
    work       p = P + c                                     the least that it takes of the device's time

b runs from 1 to `slots`; for a slope below 1 the fullest batch shares best. The first token comes with the prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from router.simulation.network import bandwidth_of
from router.simulation.replica import Truth
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, RungSpec, World
from router.values.request import Locality

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Every pair of a request and a rung that could keep the request's promise, were nobody else there.

    All arrays have one entry for each option. Times are on the device, the way there and back already taken off.

    Attributes:
        request, device, rung: positions.
        value: weight · quality.
        prefill_s, alone_s, share_s: P, D and c of the module.
        begin_s: when the prompt can be there at the soonest.
        prefill_end_s: when the prefill must be over; infinite where nothing was promised.
        end_s: when the last token must be out; infinite where nothing was promised.
        spread_s: longest time from the first token to the last; infinite where no TPOT was promised.
    """

    request: Ints
    device: Ints
    rung: Ints
    value: Floats
    prefill_s: Floats
    alone_s: Floats
    share_s: Floats
    begin_s: Floats
    prefill_end_s: Floats
    end_s: Floats
    spread_s: Floats

    @property
    def work_s(self) -> Floats:
        return self.prefill_s + self.share_s

    def __len__(self) -> int:
        return len(self.request)

    def take(self, chosen: npt.NDArray[np.bool_] | Ints) -> ServiceOptions:
        """Return some of the options, by mask or position."""
        return ServiceOptions(*(getattr(self, name)[chosen] for name in self.__slots__))


def least_share_s(rung: RungSpec, slots: int) -> float:
    """Return device-seconds a token at the batch that shares a decode step best."""
    return min(rung.step_s(batch) / batch for batch in range(1, slots + 1))


def device_seconds(rung: RungSpec, slots: int, prompt_tokens: float, answer_tokens: float) -> float:
    """Return what a request takes of the device's time while all slots decode, without noise."""
    return rung.prefill_s(prompt_tokens) + answer_tokens * rung.step_s(slots) / slots


def capacity_rps(world: World, prompt_tokens: float, answer_tokens: float) -> float:
    """Return the rate of requests of mean lengths that keeps all devices busy on their best rungs: a load of 1."""
    return sum(
        1.0 / device_seconds(device.rungs[0], device.slots, prompt_tokens, answer_tokens) for device in world.devices
    )


def service_options(
    world: World, requests: Sequence[SimRequest], truths: Sequence[Truth], *, late: bool
) -> ServiceOptions:
    """Return the options of all requests under their true lengths and noise, by device, rung and request.

    Args:
        late: whether an answer may come after its deadline, as long as it is worth anything then.
    """
    facts = _Facts.of(requests, truths, late=late)
    parts = [
        facts.on(world, position, index)
        for position, device in enumerate(world.devices)
        for index in range(len(device.rungs))
    ]
    return ServiceOptions(*(np.concatenate([getattr(p, name) for p in parts]) for name in ServiceOptions.__slots__))


@dataclass(frozen=True, slots=True)
class _Facts:
    """The requests as arrays."""

    arrival_s: Floats
    prompt: Floats
    answer: Floats
    wire_bytes: Floats
    weight: Floats
    ttft_s: Floats
    tpot_s: Floats
    deadline_s: Floats
    min_quality: Floats
    locality: Sequence[Locality]
    prefill_noise: Floats
    pace_noise: Floats
    rtt_noise: Floats

    @classmethod
    def of(cls, requests: Sequence[SimRequest], truths: Sequence[Truth], *, late: bool) -> _Facts:
        def promised(values: Sequence[float | None]) -> Floats:
            return np.array([np.inf if value is None else value for value in values], dtype=np.float64)

        asked = [request.objective for request in requests]
        return cls(
            arrival_s=np.array([r.arrival_s for r in requests], dtype=np.float64),
            prompt=np.array([r.prompt_tokens for r in requests], dtype=np.float64),
            answer=np.array([r.asked_tokens for r in requests], dtype=np.float64),
            wire_bytes=np.array([r.wire_bytes for r in requests], dtype=np.float64),
            weight=np.array([r.weight for r in requests], dtype=np.float64),
            ttft_s=promised([o.ttft_s for o in asked]),
            tpot_s=promised([o.tpot_s for o in asked]),
            deadline_s=promised([o.ends_s if late else o.deadline_s for o in asked]),
            min_quality=np.array([o.min_quality for o in asked], dtype=np.float64),
            locality=[o.locality for o in asked],
            prefill_noise=np.array([t.prefill_noise for t in truths], dtype=np.float64),
            pace_noise=np.array([t.pace_noise for t in truths], dtype=np.float64),
            rtt_noise=np.array([t.rtt_noise for t in truths], dtype=np.float64),
        )

    def on(self, world: World, position: int, index: int) -> ServiceOptions:
        """Return the options on one rung."""
        device = world.devices[position]
        rung = device.rungs[index]
        there_s, back_s = self._way_s(device)
        further = self.answer - 1.0
        prefill_s = self.prefill_noise * (rung.prefill_fixed_ms / 1e3 + self.prompt / rung.prefill_tokens_per_s)
        alone_s = self.pace_noise * further * rung.step_s(1)
        begin_s = self.arrival_s + there_s
        spread_s = np.where(further > 0, self.tpot_s, np.inf) * np.maximum(further, 1.0)
        streamed_s = self.ttft_s + np.where(further > 0, spread_s, 0.0)
        end_s = self.arrival_s + np.minimum(self.deadline_s, streamed_s) - back_s
        prefill_end_s = np.minimum(self.arrival_s + self.ttft_s - back_s, end_s - alone_s)
        wrong = Locality.CLOUD_ONLY if not device.remote else Locality.LOCAL_ONLY
        fits = (
            (self.prompt + self.answer <= rung.context_tokens)
            & (rung.quality >= self.min_quality)
            & np.array([locality is not wrong for locality in self.locality], dtype=np.bool_)
            & (begin_s + prefill_s <= prefill_end_s + _ROUNDING_S)
            & (alone_s <= spread_s + _ROUNDING_S)
        )
        count = len(self.prompt)
        everything = ServiceOptions(
            request=np.arange(count),
            device=np.full(count, position),
            rung=np.full(count, index),
            value=self.weight * rung.quality,
            prefill_s=prefill_s,
            alone_s=alone_s,
            share_s=self.pace_noise * further * least_share_s(rung, device.slots),
            begin_s=begin_s,
            prefill_end_s=prefill_end_s + _ROUNDING_S,
            end_s=end_s + _ROUNDING_S,
            spread_s=spread_s + _ROUNDING_S,
        )
        return everything.take(fits & (everything.value > 0))

    def _way_s(self, device: DeviceSpec) -> tuple[Floats | float, Floats | float]:
        """Return seconds there, over an uplink that nobody else uses and that never fails, and back."""
        if not device.remote:
            return 0.0, 0.0
        one_way_s = self.rtt_noise * device.link.rtt_ms / 2e3
        uplink = bandwidth_of(device.link)
        sent = zip(self.arrival_s.tolist(), self.wire_bytes.tolist(), strict=True)
        upload_s = np.array([uplink.end_s(at_s, sent_bytes * 8) - at_s for at_s, sent_bytes in sent])
        return one_way_s + upload_s, one_way_s
