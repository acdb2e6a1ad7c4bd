"""What a request would cost on a replica: predicted from priors, corrected by what was observed.

The model of one replica, in seconds:

    ttft    = wait + network + level · (a + b · (queued prefill + prompt − cached) · (1 + slope · running))
    finish  = ttft + (answer − 1) · pace
    pace    = sum over the rungs of the device that run something of step(their batch), the newcomer in its own
    step(n) = level · (1 + slope · (n − 1)) / decode speed

Rungs of one device take turns on it and divide its slots: `SiblingLoad` tells what the others have there. Each level is
followed by `level.py`, the line by `prefill.py`; steps are learnt from the tokens that a device's clock says should
have come (`token_clock.py`). What neither can know when a request is sent (who joins the batch, prefills in between) is
a median factor for each band of occupancy; and the upper figures are the medians times a tracked 0.9 quantile of the
error, band by band (`upper.py`). The upper finish holds the spread of the answer's length as well:

    finish_high = (ttft + (answer − 1) · pace · exp(√(log²(longest / expected) + (1.28 σ_pace)²))) · correction
"""

# ruff: noqa: PLR1730, FURB136 - done for every candidate of every decision, where each call of `max` counts
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from router.base.clock import Clock, MonotonicClock
from router.signals.exploration import AFTER_S, Exploration
from router.signals.in_flight import Attempt
from router.signals.learnt import Device, Speeds
from router.signals.level import MAX_LOG
from router.signals.occupancy import line_tokens
from router.signals.prefill import PrefillLine
from router.signals.replica_state import ReplicaState
from router.signals.token_clock import Mark
from router.signals.upper import NORMAL_90, band_of, kept_if_censored
from router.values.length import LengthCurve
from router.values.link import LinkSnapshot
from router.values.prediction import (
    NOTHING_IN_FLIGHT,
    Demand,
    InFlightLoad,
    Prediction,
    SiblingLoad,
    TtftFeatures,
)
from router.values.replica import ReplicaInfo, ReplicaSnapshot

# Waits shorter than this are scheduling noise.
_MIN_LEARNT_WAIT_S: Final = 0.02
_WAIT_GAIN: Final = 0.1
# Spread of log lengths where nobody knows the longest answer to expect: a factor of 2.
_UNKNOWN_LENGTH_LOG: Final = NORMAL_90 * math.log(2.0)
# Answers of fewer tokens tell more of the first gap than of the pace.
_LEAST_PACE_TOKENS: Final = 4
# An error says little of a rung whose steps made up less of the time, unless it is the one that least is known of.
_LEAST_SHARE: Final = 0.7


class LatencyModel:
    """Predicts for every replica, learns from every answer; one writer, the dispatcher.

    Args:
        clock: what ageing is measured on.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._now_s = (clock or MonotonicClock()).now_s
        self._speeds: dict[str, Speeds] = {}
        self._devices: dict[str, Device] = {}
        self._states: dict[str, ReplicaState] = {}
        self._exploration = Exploration()

    def predict(
        self,
        snapshot: ReplicaSnapshot,
        link: LinkSnapshot | None,
        demand: Demand,
        mine: InFlightLoad = NOTHING_IN_FLIGHT,
        ahead: int = 0,
        *,
        siblings: Sequence[SiblingLoad] = (),
    ) -> Prediction:
        """Predict `demand` on the replica of `snapshot`. Cheap while its state is the same: given the same objects.

        Args:
            mine: this tier's own unfinished requests there.
            ahead: requests of this tier that wait for the same replica and go first.
            siblings: the other rungs of its device that have sequences.
        """
        now_s = self._now_s()
        return self.predict_on(self.state(snapshot, link, mine, siblings, now_s), demand, ahead, now_s)

    def state(
        self,
        snapshot: ReplicaSnapshot,
        link: LinkSnapshot | None,
        mine: InFlightLoad,
        siblings: Sequence[SiblingLoad],
        now_s: float,
    ) -> ReplicaState:
        """Return what all predictions on a replica have in common; the last one, while that stands."""
        info = snapshot.info
        name = info.replica_id
        state = self._states.get(name)
        if state is None or not state.stands(snapshot, link, mine, siblings, now_s):
            others = [self._of(s.info) for s in siblings] if siblings else ()
            learnt = (self._of(info), self._device(info), others)
            state = self._states[name] = ReplicaState(snapshot, link, mine, siblings, learnt=learnt, now_s=now_s)
        return state

    def predict_on(
        self, state: ReplicaState, demand: Demand, ahead: int, now_s: float, *, full: bool = False
    ) -> Prediction:
        """Predict `demand` on a replica in that state; see `predict`.

        Args:
            full: it has no room before an answer ends, whatever its slots.
        """
        snapshot, pace_s, answer_tokens = state.snapshot, state.pace_s, demand.answer_tokens
        own_tokens = demand.prompt_tokens - demand.cached_tokens
        if own_tokens < 1:
            own_tokens = 1
        wait_s = wait_high_s = 0.0
        position = state.position + ahead
        if full and position < 1:
            position = 1
        if position > 0:
            wait_s = state.until_free_s(position, answer_tokens * pace_s) * state.wait_factor
            wait_high_s = wait_s * state.wait_high
        free = position <= 0
        if snapshot.credits is not None:  # they count what waits there, and what others send
            free = ahead < snapshot.credits
            if not free:
                wait_s = max(wait_s, snapshot.credit_in_s)
                wait_high_s = max(wait_high_s, wait_s)
        network_s = state.network_s + demand.prompt_bytes / state.uplink_bytes_per_s
        sent_s = network_s + state.line_a_s + state.line_b_s * own_tokens + state.backlog_s
        ttft_s = wait_s + sent_s
        rest_s = (answer_tokens - 1) * pace_s if answer_tokens > 1 else 0.0
        longest = demand.answer_high_tokens
        length_log = math.log(longest / answer_tokens) if longest and answer_tokens else _UNKNOWN_LENGTH_LOG
        longer = math.exp(math.sqrt(length_log * length_log + state.pace_spread))
        finish_s = ttft_s + rest_s
        finish_high_s = wait_high_s + (sent_s + rest_s * longer) * state.finish_factor
        return Prediction(
            wait_s,
            ttft_s,
            wait_high_s + sent_s * state.ttft_factor,
            pace_s,
            state.pace_high_s,
            finish_s,
            finish_high_s if finish_high_s > finish_s else finish_s,
            free,
            state.alone_a_s + state.alone_b_s * own_tokens,
            network_s,
            state.token_device_s,
            state.prefill_sigma,
            state.pace_sigma,
            now_s - state.idle_since_s > AFTER_S and self._explores(state, now_s),
        )

    def _explores(self, state: ReplicaState, now_s: float) -> bool:
        speeds = self._of(state.snapshot.info)
        link_log = 0.0 if state.link is None else state.link.pessimism_log
        return self._exploration.due(speeds, max(speeds.pessimism_log(now_s), link_log), now_s)

    def sent(
        self,
        snapshot: ReplicaSnapshot,
        link: LinkSnapshot | None,
        demand: Demand,
        mine: InFlightLoad,
        *,
        siblings: Sequence[SiblingLoad] = (),
    ) -> TtftFeatures:
        """Return what a request that is sent now finds on the replica, and is told: what its answer is judged by."""
        now_s, info = self._now_s(), snapshot.info
        told = self.predict(snapshot, link, demand, mine, siblings=siblings)
        device, speeds, state = self._device(info), self._of(info), self._states[info.replica_id]
        self._advance(device, now_s)
        device.clock.prefilling += 1
        device.clock.foreign[info.replica_id] = max(0, state.own - mine.requests)
        self._exploration.sent(speeds, now_s, explores=told.explore)
        return TtftFeatures(
            prefill_tokens=line_tokens(snapshot, demand, mine, state.scale),
            network_s=told.network_s,
            prompt_tokens=demand.prompt_tokens,
            cached_tokens=demand.cached_tokens,
            scale=state.scale,
            behind_s=state.behind_s,
            band=state.band,
            told=told,
        )

    def first_token(self, attempt: Attempt, now_s: float, cached_tokens: int | None = None) -> Mark:
        """Learn from an attempt's first token; returns where its device's clock stands.

        Args:
            cached_tokens: prompt tokens that came from a prefix cache, None where the replica does not tell.
        """
        info, sent = attempt.info, attempt.work
        device = self._device(info)
        self._advance(device, now_s)
        device.clock.prefilling = max(0, device.clock.prefilling - 1)
        took_s = now_s - attempt.sent_at_s if attempt.own_s is None else sent.network_s + attempt.own_s
        self.observe_ttft(info, sent, took_s, cached_tokens)
        return device.clock.began(info.replica_id)

    def observe_ttft(
        self,
        info: ReplicaInfo,
        sent: TtftFeatures,
        actual_s: float,
        cached_tokens: int | None = None,
        *,
        censored: bool = False,
    ) -> None:
        """Learn from sent → first token, against what was predicted when it was sent.

        Args:
            censored: none had come by then, which was later than predicted.
        """
        now_s = self._now_s()
        speeds, device = self._of(info), self._device(info)
        told = sent.told
        if told is not None:
            if censored:
                device.ttft_high.kept(sent.band, kept_if_censored(actual_s, told.ttft_s, told.ttft_high_s))
            else:
                device.ttft_high.observe(sent.band, _log_ratio(actual_s, told.ttft_s))
            if actual_s > sent.network_s:
                error_log = _log_ratio(actual_s - sent.network_s, told.ttft_s - sent.network_s)
                device.ttft_bias.observe(sent.band, error_log)
        actual_s -= sent.network_s + sent.behind_s
        if actual_s > 0:
            hit = sent.cached_tokens if cached_tokens is None else min(max(cached_tokens, 0), sent.prompt_tokens)
            tokens = max(sent.prefill_tokens + (sent.cached_tokens - hit) * sent.scale, 1.0)
            level_log = speeds.prefill.log(now_s)
            shape_s = speeds.line.predict(tokens)
            speeds.prefill.observe(_log_ratio(actual_s, shape_s) - level_log, now_s)
            speeds.line.observe(tokens, actual_s * math.exp(-speeds.prefill.log(now_s)))
        speeds.seen_s = now_s
        _learnt(speeds, device)

    def ended(self, attempt: Attempt, now_s: float, *, whole: bool, length: LengthCurve | None = None) -> None:
        """An attempt ended, whichever way: learn its pace, and its finish where that is known or censored.

        Args:
            length: what was believed of its length.
            whole: its answer came to its own end or to its caller's cap. One that its deadline cut, or that
                gave its slot up, is censored: it would have gone on, and counts as kept with P(the rest fits | so many
                tokens came), by `length` and its own pace. One that broke or was cancelled teaches its pace alone.
        """
        info, sent = attempt.info, attempt.work
        device = self._device(info)
        self._advance(device, now_s)
        if attempt.first_at_s is None or attempt.mark is None:
            device.clock.prefilling = max(0, device.clock.prefilling - 1)
        else:
            device.clock.ended(info.replica_id)
            self._observe_pace(attempt, attempt.pace_s, now_s)
        told = sent.told
        if told is not None and (whole or attempt.overdue or attempt.gave_up):
            took_s = now_s - attempt.sent_at_s if attempt.own_s is None else attempt.own_s
            if whole:
                kept = float(took_s <= told.finish_high_s)
            elif attempt.first_at_s is None or length is None or took_s >= told.finish_high_s:
                kept = kept_if_censored(took_s, told.finish_s, told.finish_high_s)
            else:
                pace_s = attempt.pace_s or told.tpot_s
                out_tokens = attempt.tokens + (now_s - attempt.last_at_s) / pace_s  # the last chunk may be long ago
                kept = length.left_within(out_tokens, (told.finish_high_s - took_s) / pace_s)
            device.finish_high.kept(sent.band, kept)
            _learnt(self._of(info), device)

    def _observe_pace(self, attempt: Attempt, pace_s: float | None, now_s: float) -> None:
        info, sent, mark = attempt.info, attempt.work, attempt.mark
        if pace_s is None or pace_s <= 0 or mark is None:
            return
        device, speeds = self._device(info), self._of(info)
        if sent.told is not None:
            error_log = _log_ratio(pace_s, sent.told.tpot_s)
            device.pace_bias.observe(sent.band, error_log)
            device.observe_pace_error(sent.band, error_log)
        clock = device.clock
        alone, beside = clock.alone_tokens - mark.alone_tokens, clock.beside_tokens - mark.beside_tokens
        until_last = (attempt.last_at_s - mark.at_s) / max(now_s - mark.at_s, 1e-9)  # what came after it, nobody saw
        alone, beside = until_last * alone, until_last * beside
        expected = alone + device.beside_share * beside
        if attempt.tokens >= _LEAST_PACE_TOKENS and expected > 0:
            error_log = _log_ratio(expected, attempt.tokens - 1)
            shares = clock.shares(mark)
            variances = {n: s * s * self._speeds[n].pace.variance for n, s in shares.items() if n in self._speeds}
            beside_variance = device.observe_beside(alone, beside, error_log)
            total = sum(variances.values()) + beside_variance
            for name, own in variances.items():
                share = shares[name]
                if share >= _LEAST_SHARE or own >= _LEAST_SHARE * total:
                    other = self._speeds[name]
                    other.pace.observe(error_log, now_s, share=share, others_variance=total - own)
                    _learnt(other, device)
        speeds.seen_s = now_s
        _learnt(speeds, device)

    def wait_factor(self, info: ReplicaInfo) -> float:
        """Return the factor that was learnt for waits on that replica."""
        return math.exp(self._device(info).wait_log + self._of(info).pace.log(self._now_s()))

    def observe_wait(self, info: ReplicaInfo, predicted_s: float, factor: float, actual_s: float) -> None:
        """Learn from a request that had to wait for a replica, and was bound to that very one.

        Args:
            info: the replica whose wait was predicted.
            factor: `wait_factor` at that time. A whole queue is predicted before the first of it is served: each moves
                the factor towards its own truth, not by its error, or their sum would overshoot; and what the pace has
                learnt meanwhile is not learnt twice.
        """
        if predicted_s < _MIN_LEARNT_WAIT_S:
            return
        device = self._device(info)
        ratio_log = _log_ratio(max(actual_s, _MIN_LEARNT_WAIT_S / 2), predicted_s)
        device.wait_high.observe(0, ratio_log)
        speeds = self._of(info)
        truth_log = ratio_log + math.log(factor) - speeds.pace.log(self._now_s())
        device.wait_log = _clip(device.wait_log + _WAIT_GAIN * (_clip(truth_log) - device.wait_log))
        _learnt(speeds, device)

    def step_s(self, info: ReplicaInfo, batch: int, slots: int) -> float:
        """Return the seconds of one step of `batch` sequences on a replica whose device has so many slots."""
        factors = self._device(info).factors(band_of(batch, slots, waits=False))
        return self._of(info).step_s(batch, self._now_s()) * factors.pace_bias

    def keep_only(self, replica_ids: set[str]) -> None:
        """Forget replicas that are gone, once nothing decodes there, and devices of which none is left."""
        decoding = {name for device in self._devices.values() for name in device.clock.decoding}
        for replica_id in self._speeds.keys() - replica_ids - decoding:
            del self._speeds[replica_id]
        left = {speeds.info.device_key for speeds in self._speeds.values()}
        for key in [key for key in self._devices if key not in left]:
            del self._devices[key]
        self._states.clear()

    def _of(self, info: ReplicaInfo) -> Speeds:
        speeds = self._speeds.get(info.replica_id)
        if speeds is None:
            speeds = self._speeds[info.replica_id] = Speeds(info, PrefillLine(info.prior), self._now_s())
        return speeds

    def _device(self, info: ReplicaInfo) -> Device:
        device = self._devices.get(info.device_key)
        if device is None:
            device = self._devices[info.device_key] = Device()
        return device

    def _advance(self, device: Device, now_s: float) -> None:
        device.clock.advance(now_s, lambda name, batch: self._speeds[name].step_s(batch, now_s))


def _learnt(speeds: Speeds, device: Device) -> None:
    """Something was learnt of a replica: what was computed for its device stands no more."""
    speeds.changed()
    device.changed()


def _log_ratio(actual: float, predicted: float) -> float:
    return _clip(math.log((actual if actual > 1e-9 else 1e-9) / (predicted if predicted > 1e-9 else 1e-9)))


def _clip(value: float) -> float:
    if value > MAX_LOG:
        return MAX_LOG
    return value if value > -MAX_LOG else -MAX_LOG
