"""The law over time: prompt, steady, aware of cold starts, within its bounds."""

from __future__ import annotations

import random

import msgspec
import pytest

from cloud_tier.scaling.scaler import Advice, PoolLoad, Scaler
from cloud_tier.scaling.settings import ScalingSettings

SLOTS = 8
SERVICE_S = 4.0


class Traffic:
    """A scaler, and as many running and waiting requests as its replicas would have."""

    def __init__(self, **settings) -> None:
        self.scaler = Scaler(ScalingSettings(**settings), 0.0, default_ttft_s=3.0, service_s=SERVICE_S)
        self.now_s = 0.0
        self.ready, self.starting = 1, 0
        self.chance = random.Random(1)
        self.ends: list[float] = []
        self.waiting = 0

    def run(self, seconds: float, rate: float) -> list[Advice]:
        return [self._second(rate) for _ in range(int(seconds))]

    def _second(self, rate: float) -> Advice:
        count = sum(self.chance.random() < rate / 100 for _ in range(100))
        for _ in range(count):
            self.scaler.demand.came(self.now_s + 0.5, None, None)
        self.now_s += 1.0
        for _ in [end_s for end_s in self.ends if end_s <= self.now_s]:
            self.scaler.demand.ended(SERVICE_S, 0.2)
        self.ends = [end_s for end_s in self.ends if end_s > self.now_s]
        self.waiting += count
        while self.waiting and len(self.ends) < self.ready * SLOTS:
            self.waiting -= 1
            self.ends.append(self.now_s + SERVICE_S)
        return self.scaler.advise(
            self.now_s,
            PoolLoad(
                ready=self.ready, starting=self.starting, slots=SLOTS, running=len(self.ends), waiting=self.waiting
            ),
        )


def test_steady_traffic_gets_a_steady_number() -> None:
    """4 a second for 4 s each are 16 slots; 95 % within 3 s take a few more: 3 replicas of 8."""
    traffic = Traffic()
    traffic.ready = 3
    late = traffic.run(900, 4.0)[300:]
    assert {advice.desired for advice in late} <= {3, 4}
    assert sorted(advice.load for advice in late)[len(late) // 2] == pytest.approx(19 / SLOTS, abs=0.2)
    assert late[-1].inputs["service_s"] == pytest.approx(SERVICE_S, rel=0.15)


def test_a_burst_is_asked_for_within_seconds() -> None:
    traffic = Traffic()
    traffic.run(200, 0.5)
    burst = traffic.run(20, 6.0)
    assert burst[9].desired >= 3
    assert "requests a second" in burst[9].why


def test_replicas_are_held_and_then_given_back() -> None:
    traffic = Traffic(hold_s=120.0)
    traffic.run(60, 0.5)
    traffic.ready = 5
    most = max(advice.desired for advice in traffic.run(120, 6.0)[60:])
    after = traffic.run(400, 0.5)
    assert after[30].desired >= most - 1
    assert "held at" in after[60].why
    assert after[-1].desired <= 2


def test_a_slow_start_is_asked_for_earlier() -> None:
    """While traffic rises, what is needed a cold start ahead is more, and so asked for sooner."""
    asked = []
    for cold_start_s in (2.0, 120.0):
        traffic = Traffic(cold_start_s=cold_start_s)
        traffic.ready = 10  # nobody waits: it is the forecast alone that asks
        traffic.run(100, 0.5)
        rising = [advice for rate in range(1, 60) for advice in traffic.run(2, rate / 8)]
        asked.append(next(second for second, advice in enumerate(rising) if advice.desired >= 4))
    assert asked[1] < asked[0]


def test_replicas_that_start_count() -> None:
    """What was asked for is not asked for once more while it loads: the backlog meanwhile is expected to be theirs."""
    traffic = Traffic(max_replicas=100)
    traffic.run(100, 0.5)
    first = max(advice.desired for advice in traffic.run(15, 5.0))
    traffic.starting = first - 1
    later = [advice.desired for advice in traffic.run(40, 5.0)]
    assert max(later) <= 1.5 * first


def test_a_measured_cold_start_replaces_the_guess() -> None:
    traffic = Traffic(cold_start_s=20.0)
    traffic.run(60, 0.5)
    asked = next(number for number, advice in enumerate(traffic.run(60, 6.0)) if advice.desired > 1)
    assert asked < 15
    before_s = traffic.scaler.cold_start_s
    traffic.ready = 3  # about 50 s after it was asked for
    (advice,) = traffic.run(1, 6.0)
    assert before_s == 20.0
    assert 30.0 < advice.inputs["cold_start_s"] < 60.0


def test_bounds() -> None:
    traffic = Traffic(min_replicas=2, max_replicas=3)
    assert traffic.run(5, 0.0)[-1].desired == 2
    advice = traffic.run(60, 9.0)[-1]
    assert advice.desired == 3
    assert "the bounds are 2 to 3" in advice.why
    without, beside = Traffic().run(200, 2.0)[-1], Traffic(spare_replicas=2).run(200, 2.0)[-1]
    assert beside.desired == without.desired + 2
    assert "2 to spare" in beside.why


def test_to_none_after_an_idle_time_and_back_with_the_first_request() -> None:
    traffic = Traffic(min_replicas=0, unit="replica", idle_s=100.0, hold_s=30.0)
    traffic.ready = 1
    assert traffic.run(60, 1.0)[-1].desired >= 1
    idle = traffic.run(130, 0.0)
    assert idle[50].desired >= 1
    assert idle[-1].desired == 0
    assert idle[-1].why == "no request for 100 s"
    traffic.ready = 0
    traffic.scaler.demand.came(traffic.now_s, None, None)
    seen = PoolLoad(ready=0, starting=0, slots=SLOTS, running=0, waiting=1)
    advice = traffic.scaler.advise(traffic.now_s + 1.0, seen)
    assert advice.desired == 1
    assert advice.ready_in_s == pytest.approx(60.0)


def test_a_waiting_request_brings_a_replica_whenever_it_came() -> None:
    traffic = Traffic(min_replicas=0, unit="replica", idle_s=10.0)
    traffic.run(100, 0.0)
    advice = traffic.scaler.advise(101.0, PoolLoad(ready=0, starting=0, slots=SLOTS, running=0, waiting=3))
    assert advice.desired >= 1


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"min_replicas": 4, "max_replicas": 3}, "min_replicas = 4 is above max_replicas = 3"),
        ({"min_replicas": 0}, "unit = 'replica'"),
        ({"promise_share": 1.0}, "promise_share"),
        ({"holds_s": 1.0}, "holds_s"),
    ],
)
def test_wrong_settings_are_named(table: dict, word: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=word):
        msgspec.convert(table, ScalingSettings)
