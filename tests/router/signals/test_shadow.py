"""An imagined tier: it serves as the simulator's devices do, and counts what keeps its promise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.signals.shadow import Drawn, ShadowTier
from router.values.length import LengthCurve
from router.values.offer import Ask, Offer

RUNGS = {("edge", "model"): "edge/large"}


def offer(
    replica_id: str = "edge/large",
    *,
    slots: int = 2,
    prefill_s: float = 0.1,
    step_s: float = 0.01,
    slope: float = 0.5,
    value: float = 1.0,
    rank: float = 1.0,
    latest_s: float = 100.0,
    network_s: float = 0.0,
) -> Offer:
    device = replica_id.split("/", maxsplit=1)[0]
    cost_s = prefill_s + 100 * step_s
    return Offer(
        replica_id,
        device,
        "model",
        slots,
        device == "edge",
        value,
        1.0,
        rank,
        cost_s,
        prefill_s,
        network_s,
        step_s,
        slope,
        latest_s,
    )


def drawn(
    *offers: Offer,
    at_s: float = 0.0,
    tokens: float = 101.0,
    ttft_s: float = math.inf,
    tpot_s: float = math.inf,
    deadline_s: float = math.inf,
    late_s: float = 0.0,
    priority: int = 0,
    noise: tuple[float, float] = (1.0, 1.0),
) -> Drawn:
    ask = Ask(
        offers or (offer(),), priority, LengthCurve.exactly(int(tokens)), 0.3, 0.3, ttft_s, tpot_s, deadline_s, late_s
    )
    return Drawn(ask, at_s, tokens, *noise)


def gain_at(tier: ShadowTier, now_s: float) -> float:
    """Gain so far; a newcomer whom nobody can serve moves the time."""
    tier.arrive(Drawn(Ask((), 0, LengthCurve.exactly(1), 0.3, 0.3), now_s, 1.0, 1.0, 1.0), now_s)
    return tier.gain


def test_one_sequence_takes_its_prefill_and_its_steps() -> None:
    tier = ShadowTier(RUNGS)
    tier.arrive(drawn(), 0.0)
    assert gain_at(tier, 0.1 + 100 * 0.01 - 0.001) == 0.0
    assert gain_at(tier, 0.1 + 100 * 0.01 + 0.001) == 1.0


def test_two_in_a_batch_slow_each_other_and_prompts_pause_all() -> None:
    """The second prompt comes first; then both decode at 15 ms a step."""
    tier = ShadowTier(RUNGS)
    tier.arrive(drawn(), 0.0)
    tier.arrive(drawn(), 0.0)
    ends_s = 0.2 + 100 * 0.015
    assert gain_at(tier, ends_s - 0.002) == 0.0
    assert gain_at(tier, ends_s + 0.002) == 2.0


def test_noise_is_of_its_own_prompt_and_pace() -> None:
    tier = ShadowTier(RUNGS)
    tier.arrive(drawn(noise=(2.0, 1.5)), 0.0)
    assert gain_at(tier, 0.2 + 150 * 0.01 - 0.001) == 0.0
    assert gain_at(tier, 0.2 + 150 * 0.01 + 0.001) == 1.0


@pytest.mark.parametrize(
    ("asked", "gained"),
    [
        ({"ttft_s": 0.11}, 1.0),
        ({"ttft_s": 0.09}, 0.0),
        ({"tpot_s": 0.0101}, 1.0),
        ({"tpot_s": 0.0099}, 0.0),
        ({"deadline_s": 1.11}, 1.0),
        ({"deadline_s": 1.09}, 0.0),
        ({"deadline_s": 0.6, "late_s": 1.0}, 0.5),
    ],
)
def test_what_keeps_its_promise_gains_its_value(asked: dict[str, float], gained: float) -> None:
    tier = ShadowTier(RUNGS)
    tier.arrive(drawn(**asked), 0.0)  # type: ignore[arg-type]
    assert gain_at(tier, 5.0) == pytest.approx(gained, abs=1e-6)


def test_the_network_counts() -> None:
    tier = ShadowTier({("cloud", "model"): "cloud/large"})
    tier.arrive(drawn(offer("cloud/large", network_s=0.2), deadline_s=1.2), 0.0)
    assert gain_at(tier, 5.0) == 0.0


def test_an_answer_ends_at_its_deadline_and_its_slot_goes_on() -> None:
    tier = ShadowTier(RUNGS)
    one_slot = offer(slots=1)
    tier.arrive(drawn(one_slot, tokens=10_000.0, deadline_s=2.0), 0.0)
    tier.arrive(drawn(one_slot), 0.0)
    assert gain_at(tier, 2.0 + 0.1 + 1.0 + 0.01) == 1.0


def test_a_slot_goes_to_the_highest_priority_then_to_the_highest_rank() -> None:
    tier = ShadowTier(RUNGS)
    running = offer(slots=1)
    tier.arrive(drawn(running), 0.0)
    tier.arrive(drawn(offer(slots=1, rank=1.0, value=10.0)), 0.0)
    tier.arrive(drawn(offer(slots=1, rank=2.0, value=100.0)), 0.0)
    tier.arrive(drawn(offer(slots=1, rank=0.5, value=1000.0), priority=1), 0.0)
    assert gain_at(tier, 1.2) == 1.0
    assert gain_at(tier, 2.3) == 1001.0
    assert gain_at(tier, 3.4) == 1101.0
    assert gain_at(tier, 4.5) == 1111.0


def test_who_waited_beyond_its_latest_start_is_gone() -> None:
    tier = ShadowTier(RUNGS)
    tier.arrive(drawn(offer(slots=1)), 0.0)
    tier.arrive(drawn(offer(slots=1, latest_s=1.0)), 0.0)
    assert gain_at(tier, 10.0) == 1.0


def test_it_goes_to_the_free_device_where_it_is_worth_most_and_to_its_own_rung_there() -> None:
    tier = ShadowTier({("edge", "model"): "edge/small", ("cloud", "model"): "cloud/large"})
    offers = (
        offer("edge/large", value=1.0, slots=1),
        offer("edge/small", value=0.75, slots=1),
        offer("cloud/large", value=1.0, slots=1),
        offer("cloud/small", value=0.75, slots=1),
    )
    tier.arrive(drawn(*offers), 0.0)
    tier.arrive(drawn(*offers), 0.0)
    assert gain_at(tier, 5.0) == 1.75


def test_where_the_rung_of_a_device_cannot_serve_it_another_does() -> None:
    tier = ShadowTier({("edge", "model"): "edge/small"})
    tier.arrive(drawn(offer("edge/large")), 0.0)
    assert gain_at(tier, 5.0) == 1.0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_slot_is_lost_and_no_more_is_gained_than_came(data: st.DataObject) -> None:
    """Whatever comes, also after months on the clock: time goes on, and at the end all slots are free again."""
    tier = ShadowTier({("edge", "model"): "edge/large", ("cloud", "model"): "cloud/large"})
    now_s = began_s = data.draw(st.sampled_from([0.0, 3.0e7]))
    came = 0
    for _ in range(data.draw(st.integers(1, 60))):
        now_s += data.draw(st.sampled_from([0.0, 0.01, 0.3, 5.0]))
        offers = [
            offer(name, slots=2, prefill_s=data.draw(st.sampled_from([1e-9, 0.05, 2.0])), latest_s=5.0)
            for name in data.draw(st.sampled_from([("edge/large",), ("cloud/large",), ("edge/large", "cloud/large")]))
        ]
        tokens = data.draw(st.sampled_from([1.0, 2.0, 80.0, 4000.0]))
        deadline_s = data.draw(st.sampled_from([math.inf, 0.01, 3.0]))
        tier.arrive(drawn(*offers, at_s=now_s, tokens=tokens, deadline_s=deadline_s), now_s)
        came += 1
    assert gain_at(tier, now_s + 10_000.0) <= came
    assert all(device.held == device.decoding == 0 for device in tier._devices.values())
    assert not tier._waiting or began_s == now_s
