"""Which rung a device had better run: the one that earns most with those who come, and no other for the noise of it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.signals.what_if import WhatIf
from router.values.length import LengthCurve
from router.values.offer import Ask, Offer
from router.values.replica import ReplicaInfo, SpeedPrior

LARGE, SMALL = "edge/large", "edge/small"
EDGE = ("edge", "model")


def rung(replica_id: str, value: float, step_s: float, *, local: bool = True, family: str = "model") -> Offer:
    """A rung with four slots whose answers take 100 steps."""
    device = replica_id.split("/", maxsplit=1)[0]
    cost_s = 0.05 + 100 * step_s * 1.3 / 4
    return Offer(replica_id, device, family, 4, local, value, 1.0, value / cost_s, cost_s, 0.05, 0.0, step_s, 0.1, 4.0)


def ask(small_value: float = 0.75, *, deadline_s: float = 6.0) -> Ask:
    offers = (rung(LARGE, 1.0, 0.02), rung(SMALL, small_value, 0.008))
    return Ask(offers, 0, LengthCurve.exactly(100), 0.1, 0.1, deadline_s=deadline_s)


def of(*offers: Offer) -> WhatIf:
    """Return what imagines the replicas that make these offers."""
    what_if = WhatIf()
    what_if.set_replicas(infos(*offers))
    return what_if


def infos(*offers: Offer) -> list[ReplicaInfo]:
    return [
        ReplicaInfo(
            replica_id=offer.replica_id,
            endpoint="local" if offer.local else "http://cloud",
            tier="edge",
            remote=not offer.local,
            family=offer.family,
            variant=offer.replica_id,
            rung=0,
            quality=offer.value,
            context_tokens=4096,
            prior=SpeedPrior(1000.0, 1.0 / offer.step_s),
            device=offer.device,
        )
        for offer in offers
    ]


def run(what_if: WhatIf, rng: random.Random, from_s: float, count: int, mean_gap_s: float) -> float:
    for _ in range(count):
        from_s += rng.expovariate(1 / mean_gap_s)
        what_if.arrived(from_s, ask())
    return from_s


def test_nothing_speaks_against_a_rung_that_is_not_known() -> None:
    what_if = WhatIf()
    assert what_if.favours("edge", "model", SMALL)
    assert what_if.favours("edge", "model", LARGE)
    assert what_if.favoured() == {}


def test_before_anybody_came_the_last_rung_is_favoured() -> None:
    """What all come at once to a tier of which nothing is known do not hold its large rung's slots."""
    what_if = of(*ask().offers)
    assert what_if.favoured() == {EDGE: SMALL}
    for _ in range(20):
        what_if.arrived(0.0, ask())
        assert what_if.favoured() == {EDGE: SMALL}


def test_where_few_come_the_third_finds_the_best_rung() -> None:
    what_if = of(*ask().offers)
    for index in range(3):
        what_if.arrived(index * 4.0, ask())
    assert what_if.favoured() == {EDGE: LARGE}


def test_it_tells_how_many_came_lately() -> None:
    what_if = of(*ask().offers)
    for index in range(3):
        assert what_if.arrivals_per_s("model", index * 4.0) == 0.0, "of so few, nothing is known"
        what_if.arrived(index * 4.0, ask())
    assert what_if.arrivals_per_s("model", 8.0) == pytest.approx(3 / 8)
    assert what_if.arrivals_per_s("model", 30.0) == pytest.approx(0.1), "the longer nobody comes, the fewer come"


def test_a_cloud_that_is_reached_later_begins_at_its_last_rung_too() -> None:
    what_if = of(*ask().offers)
    cloud = (rung("cloud/large", 1.0, 0.002, local=False), rung("cloud/small", 0.75, 0.001, local=False))
    what_if.set_replicas(infos(*ask().offers, *cloud))
    assert what_if.favoured() == {EDGE: SMALL, ("cloud", "model"): "cloud/small"}


def test_a_device_steps_down_when_more_comes_than_it_can_serve_and_up_again_after() -> None:
    what_if, rng = of(*ask().offers), random.Random(3)
    at_s = run(what_if, rng, 0.0, 60, 4.0)
    assert what_if.favoured() == {EDGE: LARGE}
    at_s = run(what_if, rng, at_s, 60, 0.25)
    assert what_if.favoured() == {EDGE: SMALL}
    assert not what_if.favours("edge", "model", LARGE)
    run(what_if, rng, at_s, 200, 4.0)
    assert what_if.favoured() == {EDGE: LARGE}


def test_a_stampede_is_seen_within_a_dozen_arrivals() -> None:
    what_if = of(*ask().offers)
    run(what_if, random.Random(1), 0.0, 12, 0.1)
    assert what_if.favoured() == {EDGE: SMALL}


def test_bursts_count_although_their_mean_would_fit() -> None:
    """Thirty at once and then nothing for 25 s: the large rung has time for all, but not in time."""
    what_if, at_s = of(*ask().offers), 0.0
    for _ in range(6):
        for _ in range(30):
            at_s += 0.01
            what_if.arrived(at_s, ask())
        at_s += 25.0
    assert what_if.favoured() == {EDGE: SMALL}


def test_after_a_pause_the_best_rung_serves_first_again() -> None:
    what_if, rng = of(*ask().offers), random.Random(2)
    at_s = run(what_if, rng, 0.0, 80, 0.2)
    assert what_if.favoured() == {EDGE: SMALL}
    what_if.arrived(at_s + 60.0, ask())
    assert what_if.favoured() == {EDGE: LARGE}


def test_promises_that_the_large_rung_cannot_keep_are_no_gain() -> None:
    what_if, at_s = of(*ask().offers), 0.0
    for _ in range(40):
        at_s += 6.0
        what_if.arrived(at_s, ask(deadline_s=1.5))
    assert what_if.favoured() == {EDGE: SMALL}


def test_each_side_has_its_level() -> None:
    """The cloud has time for its large rung; the device has not, and nobody else can take its requests."""
    at_s, rng = 0.0, random.Random(5)
    cloud = (rung("cloud/large", 1.0, 0.002, local=False), rung("cloud/small", 0.75, 0.001, local=False))
    what_if = of(*ask().offers, *cloud)
    for index in range(200):
        at_s += rng.expovariate(1 / 0.35)
        at_home = ask()
        what_if.arrived(at_s, Ask(at_home.offers if index % 2 else cloud, 0, at_home.length, 0.1, 0.1, deadline_s=3.0))
    assert what_if.favoured() == {EDGE: SMALL, ("cloud", "model"): "cloud/large"}


def test_one_rung_a_device_leaves_nothing_to_imagine() -> None:
    what_if = of(rung(LARGE, 1.0, 0.02))
    for index in range(50):
        what_if.arrived(index * 0.1, Ask((rung(LARGE, 1.0, 0.02),), 0, LengthCurve.exactly(100), 0.1, 0.1))
    assert what_if.favoured() == {EDGE: LARGE}
    assert not what_if.has_a_choice


def test_each_family_of_models_has_its_rung() -> None:
    """What one family steps down to is no reason against another's."""
    offer, rng = rung("edge/other", 1.0, 0.02, family="other"), random.Random(9)
    what_if, other = of(*ask().offers, offer), Ask((offer,), 0, LengthCurve.exactly(100), 0.1, 0.1)
    what_if.arrived(0.0, other)
    at_s = run(what_if, rng, 0.0, 80, 0.2)
    what_if.arrived(at_s, other)
    assert what_if.favoured() == {EDGE: SMALL, ("edge", "other"): "edge/other"}
    assert what_if.favours("edge", "other", "edge/other")


def test_families_with_devices_of_their_own_choose_apart() -> None:
    """A flood for one model is no reason to step down with another, nor to think that many come for it."""
    quiet = (rung("other/large", 1.0, 0.02, family="other"), rung("other/small", 0.75, 0.008, family="other"))
    what_if, rng, at_s = of(*ask().offers, *quiet), random.Random(9), 0.0
    for index in range(120):
        at_s = run(what_if, rng, at_s, 1, 0.2)
        if index % 20 == 0:
            what_if.arrived(at_s, Ask(quiet, 0, LengthCurve.exactly(100), 0.1, 0.1))
    assert what_if.favoured() == {EDGE: SMALL, ("other", "other"): "other/large"}
    assert what_if.arrivals_per_s("model", at_s) > 4.0
    assert what_if.arrivals_per_s("other", at_s) < 0.5
    assert what_if.arrivals_per_s("unknown", at_s) == 0.0


def test_families_that_share_a_device_are_imagined_together() -> None:
    """Also those that share none with one another, but each with a third."""
    here = rung("a/x", 1.0, 0.02, family="x"), rung("a/y", 1.0, 0.02, family="y")
    there = rung("b/y", 1.0, 0.02, family="y"), rung("b/z", 1.0, 0.02, family="z")
    what_if = of(rung("c/w", 1.0, 0.02, family="w"), here[0], there[1], here[1], there[0])
    assert set(what_if._together) == {frozenset({"x", "y", "z"}), frozenset({"w"})}
    assert what_if._of["x"] is what_if._of["z"]
    version = what_if.version
    what_if.set_replicas(infos(*here, *there))
    assert set(what_if._of) == {"x", "y", "z"}
    assert what_if.version > version


def test_a_family_for_which_nobody_comes_any_more_has_no_say() -> None:
    """What two families share is given to the one that is asked for."""
    others = rung("edge/other", 1.0, 0.02, family="other"), rung("edge/less", 0.5, 0.008, family="other")
    what_if, rng = of(*ask().offers, *others), random.Random(3)
    for index in range(40):
        what_if.arrived(index * 0.05, Ask(others, 0, LengthCurve.exactly(100), 0.1, 0.1, deadline_s=3.0))
    assert what_if.favoured() == {EDGE: SMALL, ("edge", "other"): "edge/less"}
    run(what_if, rng, 200.0, 20, 4.0)
    assert what_if.favoured() == {EDGE: LARGE, ("edge", "other"): "edge/other"}


def test_replicas_that_left_are_forgotten_and_new_ones_imagined() -> None:
    large, small = ask().offers
    what_if, rng = of(large, small), random.Random(4)
    at_s = run(what_if, rng, 0.0, 80, 0.2)
    assert what_if.favoured() == {EDGE: SMALL}
    version = what_if.version
    what_if.set_replicas(infos(small, large))
    assert what_if.version == version, "nobody came or left"
    what_if.set_replicas(infos(large))
    assert what_if.favoured() == {EDGE: LARGE}
    what_if.set_replicas([])
    assert what_if.favoured() == {}
    what_if.set_replicas(infos(large, small))
    run(what_if, rng, at_s, 80, 0.2)
    assert what_if.favoured() == {EDGE: SMALL}


def test_the_ladder_follows_what_is_known_of_quality() -> None:
    large, small = ask().offers
    what_if = of(large, small)
    assert what_if.favoured() == {EDGE: SMALL}
    what_if.set_replicas(infos(rung(LARGE, 0.5, 0.02), small))
    assert what_if.favoured() == {EDGE: LARGE}, "the last rung now"


def test_an_offer_of_one_that_left_meanwhile_does_no_harm() -> None:
    large, small = ask().offers
    tiny = rung("edge/tiny", 0.5, 0.004)
    what_if = of(large, small)
    for index in range(20):
        what_if.arrived(index * 0.1, Ask((large, small, tiny), 0, LengthCurve.exactly(100), 0.1, 0.1))
    assert what_if.favoured() == {EDGE: SMALL}


def test_a_fleet_of_devices_has_few_configurations() -> None:
    offers = tuple(
        rung(f"d{device}/{name}", value, step_s, local=device == 0)
        for device in range(20)
        for name, value, step_s in (("large", 1.0, 0.02), ("small", 0.75, 0.008), ("tiny", 0.4, 0.003))
    )
    what_if = of(*offers)
    what_if.arrived(0.0, Ask(offers, 0, LengthCurve.exactly(100), 0.1, 0.1))
    assert len(what_if._of["model"]._tiers) == 9
    assert len(what_if.favoured()) == 20


def test_the_same_arrivals_imagine_the_same() -> None:
    def favoured() -> list[dict[tuple[str, str], str]]:
        what_if, rng, at_s, seen = of(*ask().offers), random.Random(7), 0.0, []
        for _ in range(300):
            at_s = run(what_if, rng, at_s, 1, 0.5)
            seen.append(dict(what_if.favoured()))
        return seen

    assert favoured() == favoured()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), mean_gap_s=st.floats(0.15, 3.0))
def test_a_steady_load_settles(seed: int, mean_gap_s: float) -> None:
    """The noise of what happens to arrive is seldom a reason to go to and fro."""
    what_if, rng, at_s, versions = of(*ask().offers), random.Random(seed), 0.0, []
    for _ in range(300):
        at_s = run(what_if, rng, at_s, 1, mean_gap_s)
        versions.append(what_if.version)
    assert versions[-1] - versions[100] <= 12


def test_rungs_that_earn_alike_do_not_take_turns() -> None:
    what_if, rng, at_s = of(*ask().offers), random.Random(8), 0.0
    for _ in range(600):
        at_s += rng.expovariate(2.0)
        what_if.arrived(at_s, ask(1.0, deadline_s=math.inf))
    assert what_if.version <= 4


@pytest.mark.parametrize("value", [0.0, 1e-9])
def test_rungs_without_value_do_no_harm(value: float) -> None:
    offers = (rung(LARGE, value, 0.02), rung(SMALL, 0.0, 0.008))
    what_if = of(*offers)
    for index in range(20):
        what_if.arrived(index * 0.1, Ask(offers, 0, LengthCurve.exactly(100), 0.1, 0.1))
    assert set(what_if.favoured()) == {EDGE}


def test_without_a_choice_of_rungs_there_is_nothing_to_imagine() -> None:
    large, small = rung(LARGE, 1.0, 0.02), rung(SMALL, 0.75, 0.008)
    assert not of(large).has_a_choice
    assert not of(large, rung("cloud/other", 1.0, 0.01, local=False)).has_a_choice
    what_if = of(large, small)
    assert what_if.has_a_choice
    what_if.set_replicas(infos(small))
    assert not what_if.has_a_choice
