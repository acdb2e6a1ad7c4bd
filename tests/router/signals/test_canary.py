"""A canary gets its share, keeps its sessions, and steps back when it is worse; one that is not seldom does."""

from __future__ import annotations

import random

import msgspec
import pytest

from router.signals.canary import Canaries, Canary, Side
from router.values.prompt import TextPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import CanarySettings, DeploymentPattern, QualityProbe
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import info

OLD = info("fp32", replica_id="old/tiny-fp32", backend="old", version="1.0")
NEW = info("fp32", replica_id="new/tiny-fp32", backend="new", version="1.1")


def table(**changes: object) -> CanarySettings:
    return msgspec.structs.replace(CanarySettings(name="next", canary=DeploymentPattern(backend="new")), **changes)


def ask(number: int, session: str | None = None) -> InferenceRequest:
    return InferenceRequest(
        request_id=f"r{number}",
        model="tiny",
        prompt=TextPrompt("hello"),
        sampling=SamplingParams(),
        objective=Objective(session=session),
        prompt_tokens=10,
        accepted_at_s=0.0,
    )


class Trial:
    """A stream of requests to two deployments; tells how many of the canary's it took until it stepped back."""

    def __init__(self, settings: CanarySettings, seed: int) -> None:
        self.told: list[Canary] = []
        self.canaries = Canaries(VirtualClock(), self.told.append)
        self.canaries.reconfigure([settings])
        (self.canary,) = self.canaries
        self.chance = random.Random(seed)
        self.reached = 0

    def run(
        self,
        requests: int,
        *,
        errors: tuple[float, float] = (0.0, 0.0),
        slower: float = 1.0,
        sigma: float = 0.5,
        session_of: int = 1,
    ) -> bool:
        """Send requests; errors of stable and canary. Whether it stepped back."""
        for number in range(requests):
            request = ask(number, None if session_of == 1 else f"s{number // session_of}")
            side = self.canary.side_of(request)
            new = side is Side.CANARY
            where, factor = (NEW, slower) if new else (OLD, 1.0)
            self.reached += new
            if self.chance.random() < errors[new]:
                self.canaries.failed(where, request, 2_000.0)
            else:
                ttft_s = factor * 0.3 * self.chance.lognormvariate(0.0, 2 * sigma)
                self.canaries.first_token(where, request, 2_000.0, ttft_s)
                pace_s = factor * 0.02 * self.chance.lognormvariate(0.0, sigma)
                self.canaries.ended(where, request, 2_000.0, pace_s)
            if self.told:
                return True
        return False


def test_the_share_of_sessions_is_the_weight_and_a_larger_weight_moves_nobody_back() -> None:
    small, large = Canary(table(weight=0.1), 0.0), Canary(table(weight=0.3), 0.0)
    ours = [n for n in range(4_000) if small.side_of(ask(n)) is Side.CANARY]
    assert 330 <= len(ours) <= 470
    assert all(large.side_of(ask(n)) is Side.CANARY for n in ours)
    assert {small.side_of(ask(n, "chat 7")) for n in range(50)} == {small.side_of(ask(0, "chat 7"))}


@pytest.mark.parametrize("weight", [0.05, 0.1])
def test_five_percent_of_errors_step_back_before_a_hundred_requests(weight: float) -> None:
    trials = [Trial(table(weight=weight), seed) for seed in range(60)]
    soon = [trial.run(round(100 / weight), errors=(0.0, 0.05)) and trial.reached < 100 for trial in trials]
    assert sum(soon) >= 0.93 * len(trials)  # 3.7 % of such deployments show one error or none in 99 requests
    assert {trial.told[0].by for trial in trials if trial.told} == {"errors"}


def test_three_times_slower_steps_back_before_a_hundred_requests() -> None:
    trials = [Trial(table(weight=0.1), seed) for seed in range(100)]
    assert all(trial.run(1_000, slower=3.0) and trial.reached < 100 for trial in trials)


def test_sessions_are_counted_once_and_still_found_out_in_time() -> None:
    trials = [Trial(table(weight=0.1), seed) for seed in range(50)]
    soon = [trial.run(1_500, slower=3.0, session_of=5) and trial.reached < 100 for trial in trials]
    assert sum(soon) >= 45


@pytest.mark.parametrize("session_of", [1, 8])
def test_one_that_is_no_worse_steps_back_no_more_often_than_it_was_told(session_of: int) -> None:
    settings = table(weight=0.2, false_alarm=0.1, slower=1.0)
    alarms = sum(Trial(settings, seed).run(600, errors=(0.03, 0.03), session_of=session_of) for seed in range(60))
    assert alarms <= 60 * 0.1


def test_a_slowdown_within_what_is_allowed_is_none() -> None:
    settings = table(weight=0.2, slower=1.5)
    assert sum(Trial(settings, seed).run(800, slower=1.3) for seed in range(30)) <= 2


def test_failures_of_one_session_are_one() -> None:
    trial = Trial(table(weight=0.5), 0)
    session = next(f"s{n}" for n in range(100) if trial.canary.side_of(ask(0, f"s{n}")) is Side.CANARY)
    for number in range(200):
        trial.canaries.failed(NEW, ask(number, session), 2_000.0)
    assert not trial.told
    assert trial.canary.counts[Side.CANARY].failed == 1


def test_quality_probes_that_only_the_canary_fails_step_it_back() -> None:
    trial = Trial(table(probes=(QualityProbe(prompt="2 + 2 =", expect="4"),)), 0)
    for good in (True, False):
        for _ in range(50):
            trial.canaries.probed(trial.canary, canary_good=good, stable_good=good)
    assert not trial.told, "a prompt that both fail tells nothing"
    for _ in range(12):
        trial.canaries.probed(trial.canary, canary_good=False, stable_good=True)
    assert [canary.by for canary in trial.told] == ["probes"]
    assert trial.canary.why.startswith("probes: 9 failed here alone, 0 on")


def test_one_that_stepped_back_gets_nobody_and_stays_so_until_its_table_changes() -> None:
    trial = Trial(table(weight=0.5), 1)
    assert trial.run(2_000, slower=5.0)
    assert trial.canary.weight == 0.0
    assert all(trial.canary.side_of(ask(n)) is Side.STABLE for n in range(100))
    trial.canaries.reconfigure([table(weight=0.5)])
    assert [c.why for c in trial.canaries] == [trial.canary.why]
    trial.canaries.reconfigure([table(weight=0.6)])
    assert [c.why for c in trial.canaries] == [""]


def test_another_weight_keeps_what_was_seen_and_another_pattern_does_not() -> None:
    trial = Trial(table(weight=0.1), 1)
    trial.run(300)
    seen = trial.canary.counts[Side.STABLE].answered
    trial.canaries.reconfigure([table(weight=0.2)])
    (kept,) = trial.canaries
    assert (kept.weight, kept.counts[Side.STABLE].answered) == (0.2, seen)
    trial.canaries.reconfigure([table(weight=0.2, canary=DeploymentPattern(version="1.*1"))])
    (anew,) = trial.canaries
    assert anew.counts[Side.STABLE].answered == 0


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ({"backend": "new"}, True),
        ({"version": "1.1*"}, True),
        ({"variant": "tiny-*"}, True),
        ({"replica": "new/*"}, True),
        ({"backend": "new", "version": "2.*"}, False),
    ],
)
def test_patterns_of_a_deployment_all_have_to_match(pattern: dict[str, str], fits: bool) -> None:
    canary = Canary(table(canary=DeploymentPattern(**pattern)), 0.0)
    assert (canary.side_at(NEW) is Side.CANARY) is fits


def test_who_belongs_to_neither_deployment_is_on_no_side() -> None:
    canary = Canary(table(stable=DeploymentPattern(backend="old")), 0.0)
    assert [canary.side_at(i) for i in (NEW, OLD, info("int8"))] == [Side.CANARY, Side.STABLE, None]
    assert Canary(table(model="other"), 0.0).side_at(NEW) is None
