"""What each policy chooses, and what it calls that."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import Unavailable
from router.dispatch.records.decision_value import why_not
from router.dispatch.records.record import REASONS
from router.policy.promise import keeps
from router.policy.registry import POLICIES, load_policy
from router.values.choice import Choice, Hopeless
from router.values.length import EDGES, LengthCurve
from router.values.prediction import Prediction
from router.values.request import Locality, Objective
from router.values.settings import RouterSettings
from router.values.situation import Candidate, Situation
from tests.support.router_fakes import info, request, world


def predicted(ttft_s: float = 0.1, tpot_s: float = 0.02, wait_s: float = 0.0, answer: int = 50) -> Prediction:
    ttft_s += wait_s
    return Prediction(
        wait_s=wait_s,
        ttft_s=ttft_s,
        ttft_high_s=ttft_s * 1.5,
        tpot_s=tpot_s,
        tpot_high_s=tpot_s * 1.2,
        finish_s=ttft_s + (answer - 1) * tpot_s,
        finish_high_s=ttft_s * 1.5 + (answer - 1) * tpot_s * 1.2,
        free=wait_s == 0,
        prefill_s=ttft_s - wait_s,
        token_device_s=tpot_s / 4,
    )


def candidate(name: str = "int8", *, remote: bool = False, window_cap: int | None = None, **times: Any) -> Candidate:
    return Candidate(info(name, remote=remote), predicted(**times), window_cap)


def situation(*candidates: Candidate, objective: Objective | None = None, **changes: Any) -> Situation:
    remote = [c for c in candidates if c.info.remote]
    fields: dict[str, Any] = {
        "objective": objective or Objective(ttft_s=3.0),
        "ttft_promised": False,
        "waited_s": 0.0,
        "wait_left_s": 30.0,
        "candidates": candidates,
        "best_quality": max(c.info.quality for c in candidates),
        "answer_tokens": 50,
        "open_ended": False,
        "emitted_tokens": 0,
        "answer_cap": None,
        "overloaded": False,
        "pinned": False,
        "only_remote_fits": False,
        "remote_served": bool(remote),
        "local_down": False,
        "remote_down": False,
        "settings": RouterSettings(),
        "length": LengthCurve.exactly(changes.get("answer_tokens", 50)),
        "now_s": 1000.0,
    }
    return Situation(**{**fields, **changes})


def decide(name: str, case: Situation) -> Choice:
    choice = load_policy(name).decide(case)
    assert isinstance(choice, Choice), choice
    return choice


LOCAL, SMALL = candidate("int8"), candidate("pruned-int8", ttft_s=0.05)
CLOUD, CLOUD_SMALL = candidate("fp32", remote=True), candidate("pruned-fp32", remote=True)
ALL = (LOCAL, SMALL, CLOUD, CLOUD_SMALL)
DEFAULT = "quality-in-objective"


def test_every_policy_loads_and_decides():
    for name in POLICIES:
        decide(name, situation(*ALL))


@pytest.mark.parametrize(
    ("policy", "chosen", "reason"),
    [
        (DEFAULT, LOCAL, "device-first"),
        ("slo-utility", LOCAL, "device-first"),
        ("local-first", LOCAL, "device-first"),
        ("local-only", LOCAL, "local-only"),
        ("cloud-first", CLOUD, "cloud-first"),
        ("smallest-rung", SMALL, "smallest-rung"),
    ],
)
def test_an_idle_world_shows_each_preference(policy, chosen, reason):
    choice = decide(policy, situation(*ALL))
    assert (choice.candidate, choice.reason) == (chosen, reason)


def test_the_device_wins_within_the_slack_and_the_cloud_beyond_it():
    near = msgspec.structs.replace(LOCAL, info=info("int8", quality=0.95))
    far = msgspec.structs.replace(LOCAL, info=info("int8", quality=0.94))
    assert decide(DEFAULT, situation(near, CLOUD)).candidate is near
    assert decide(DEFAULT, situation(far, CLOUD)).candidate is CLOUD


def test_the_device_is_waited_for_while_it_keeps_the_promise_then_the_cloud_takes_over():
    patient, busy = candidate("int8", wait_s=1.0), candidate("int8", wait_s=3.0)
    assert decide(DEFAULT, situation(patient, CLOUD)).candidate is patient
    choice = decide(DEFAULT, situation(busy, CLOUD))
    assert (choice.candidate, choice.reason, choice.degraded) == (CLOUD, "overflow", False)
    late = situation(patient, CLOUD, waited_s=1.6)
    assert decide(DEFAULT, late).candidate is CLOUD, "time spent waiting counts"


def test_a_slow_device_is_no_busy_device():
    slow = candidate("int8", ttft_s=5.0)
    assert decide(DEFAULT, situation(slow, CLOUD)).reason == "objective"


def test_reasons_name_what_left_no_other_choice():
    assert decide(DEFAULT, situation(CLOUD, only_remote_fits=True)).reason == "context"
    assert decide(DEFAULT, situation(CLOUD, local_down=True)).reason == "device-down"
    assert decide(DEFAULT, situation(LOCAL)).reason == "best-quality"
    assert decide(DEFAULT, situation(LOCAL, pinned=True)).reason == "pinned"
    for locality in (Locality.LOCAL_ONLY, Locality.CLOUD_ONLY):
        case = situation(LOCAL, objective=Objective(ttft_s=3.0, locality=locality))
        assert decide(DEFAULT, case).reason == locality.value


def test_it_steps_down_before_it_is_late():
    case = situation(candidate("int8", wait_s=9.0), SMALL, candidate("fp32", remote=True, wait_s=9.0))
    choice = decide(DEFAULT, case)
    assert (choice.candidate, choice.reason, choice.degraded) == (SMALL, "step-down", True)


def test_a_smaller_rung_because_the_upstream_is_gone_says_so():
    choice = decide(DEFAULT, situation(SMALL, best_quality=1.0, remote_served=True, remote_down=True))
    assert (choice.reason, choice.degraded) == ("upstream-down", True)


def test_a_pinned_variant_is_not_degraded_by_its_own_rung():
    choice = decide(DEFAULT, situation(SMALL, best_quality=0.72, pinned=True))
    assert (choice.reason, choice.degraded) == ("pinned", False)


@pytest.mark.parametrize("policy", [DEFAULT, "slo-utility", "local-first", "cloud-first", "smallest-rung"])
def test_no_deadline_caps_an_answer(policy):
    """It is cut at its deadline if it comes to that, and not by what anybody predicted."""
    for objective in (Objective(ttft_s=3.0, deadline_s=4.0), Objective(deadline_s=4.0, shorten=True)):
        case = situation(candidate("int8", tpot_s=0.1), objective=objective)
        choice = decide(policy, case)
        assert (choice.max_tokens, choice.degraded) == (None, False)
        rest = situation(candidate("int8", tpot_s=0.05), objective=objective, emitted_tokens=10, answer_tokens=50)
        assert decide(policy, rest).max_tokens is None


@pytest.mark.parametrize("policy", [DEFAULT, "slo-utility"])
def test_a_deadline_is_lost_once_the_whole_answer_is_all_but_certain_to_miss_it(policy):
    """50 tokens of 0.5 s in 4 s; 16 of them would be in time, and are no answer."""
    case = situation(candidate("int8", tpot_s=0.5), objective=Objective(ttft_s=3.0, deadline_s=4.0))
    refusal = load_policy(policy).decide(case)
    assert isinstance(refusal, Hopeless)
    assert refusal.deadline_lost
    unknown = msgspec.structs.replace(case, length=LengthCurve.of([math.exp(-edge / 20.0) for edge in EDGES]))
    assert isinstance(load_policy(policy).decide(unknown), Choice), "it may be a short one"


def test_the_smallest_cap_wins():
    case = situation(candidate("int8", window_cap=40), answer_cap=64)
    assert decide(DEFAULT, case).max_tokens == 40
    assert decide(DEFAULT, situation(LOCAL, answer_cap=30)).max_tokens == 30


def test_overload_uses_every_rung_that_is_free():
    case = situation(candidate("int8", wait_s=0.5), SMALL, overloaded=True, answer_cap=64)
    choice = decide(DEFAULT, case)
    assert (choice.candidate, choice.reason, choice.max_tokens) == (SMALL, "step-down", 64)


def test_a_default_is_kept_late_a_promise_is_refused_while_others_are_served():
    busy = candidate("int8", wait_s=9.0)
    assert decide(DEFAULT, situation(busy)).reason == "late"
    refusal = load_policy(DEFAULT).decide(situation(busy, ttft_promised=True))
    assert isinstance(refusal, Hopeless)
    assert refusal.retry_after_s == pytest.approx(9.0)
    assert not refusal.deadline_lost
    sheddable = situation(busy, objective=Objective(ttft_s=3.0, priority=-1))
    assert isinstance(load_policy(DEFAULT).decide(sheddable), Hopeless)


def test_a_free_replica_that_is_no_use_does_not_say_come_back_at_once():
    idle_but_small = candidate("pruned-int8", tpot_s=1.0)
    busy = candidate("int8", wait_s=9.0)
    asked = Objective(ttft_s=3.0, deadline_s=10.0)
    refusal = load_policy(DEFAULT).decide(situation(busy, idle_but_small, objective=asked, ttft_promised=True))
    assert isinstance(refusal, Hopeless)
    assert refusal.retry_after_s == pytest.approx(9.0)


def test_an_idle_replica_is_tried_even_if_it_is_predicted_to_be_late():
    slow = candidate("int8", ttft_s=5.0)
    assert decide(DEFAULT, situation(slow, ttft_promised=True)).reason == "late"


def test_a_wait_beyond_the_bound_is_refused_early():
    refusal = load_policy(DEFAULT).decide(situation(candidate("int8", wait_s=50.0)))
    assert isinstance(refusal, Hopeless)


@pytest.mark.parametrize("upstream_known", [False, True])
async def test_local_only_serves_the_same_whether_or_not_there_is_an_upstream(upstream_known):
    """A remote window that holds the whole answer must not rule out the local one that has to cut it."""
    async with world(remote=upstream_known, policy="local-only") as w:
        route, _ = await w.clock.run(w.ask(prompt_tokens=1900, max_tokens=400))
        assert (route.variant, route.reason, route.degraded) == ("tiny-int8", "shorter-answer", True)
        route, _ = await w.clock.run(w.ask(max_tokens=8))
        assert (route.variant, route.reason, route.degraded) == ("tiny-int8", "local-only", False)


async def test_local_only_refuses_what_only_the_cloud_could_do_and_says_why():
    async with world(policy="local-only") as w:
        w.local.available = w.small.available = False
        ask = request(w.clock)
        with pytest.raises(Unavailable, match="switched off"):
            await w.clock.run(w.read(ask))
        rejected = {c["replica"]: c["why"] for c in w.record(ask.request_id)["candidates"] if "rejected" in c}
        assert "policy `local-only`" in rejected["http://cloud:8700/tiny-fp32"]
        with pytest.raises(Unavailable, match="policy `local-only` keeps to local-only"):
            await w.clock.run(w.ask(model="tiny-fp32"))
        assert w.cloud.sent == w.cloud_small.sent == []


def test_a_tpot_is_kept_by_the_upper_figure():
    """`candidate` predicts 20 ms a token, 24 ms at most nine times in ten."""
    for asked_s, kept in ((0.022, False), (0.025, True)):
        quick = candidate("fp32", remote=True, tpot_s=0.01)
        case = situation(LOCAL, quick, objective=Objective(ttft_s=3.0, tpot_s=asked_s))
        assert keeps(LOCAL, case) is kept
        code, why = why_not(LOCAL, quick, case)
        assert (code == "tpot", "24.0 ms a token (p90)" in why) == (not kept, not kept)


@pytest.mark.parametrize("name", [DEFAULT, "local-first", "slo-utility"])
@pytest.mark.parametrize("objective", [Objective(ttft_s=3.0), Objective(deadline_s=9.0)])
def test_a_device_whose_window_would_cut_the_answer_leaves_it_to_one_that_holds_it(name, objective):
    narrow = msgspec.structs.replace(LOCAL, longest_answer=20)
    wide = msgspec.structs.replace(CLOUD, longest_answer=6000)
    case = situation(narrow, wide, objective=objective, longest_answer=6000)
    assert decide(name, case).candidate is wide
    assert why_not(narrow, wide, case) == ("window", "20 tokens of an answer fit its window, 50 are expected")
    room = msgspec.structs.replace(LOCAL, longest_answer=50)
    assert decide(name, situation(room, wide, objective=objective, longest_answer=6000)).candidate is room
    assert decide(name, situation(narrow, objective=objective, longest_answer=20)).candidate is narrow, "rather cut"


def test_a_prompt_goes_where_it_costs_those_who_run_least_or_waits():
    """`slo-utility` takes what others would lose from what a request is worth, only where it would begin now."""
    objective = Objective(deadline_s=9.0)
    joins, harms = LOCAL, msgspec.structs.replace(LOCAL, at_stake=0.3)
    assert decide("slo-utility", situation(joins, CLOUD, objective=objective)).candidate is joins
    elsewhere = decide("slo-utility", situation(harms, CLOUD, objective=objective))
    assert elsewhere.candidate is CLOUD
    assert why_not(harms, CLOUD, situation(harms, CLOUD, objective=objective)) == (
        "beside",
        "those who run there would lose 0.30 answers by its prompt, at the chosen one 0.00",
    )
    alone = decide("slo-utility", situation(harms, objective=objective))
    assert alone.starts, "it is worth more than that"
    left = 1.0 - 0.3 / LOCAL.info.quality
    assert alone.rank == pytest.approx(left * decide("slo-utility", situation(joins, objective=objective)).rank)
    ruins = msgspec.structs.replace(LOCAL, at_stake=0.7)
    waits = decide("slo-utility", situation(ruins, objective=objective))
    assert not waits.starts
    assert waits.kept == 1.0, "its own promise is not what is in doubt"
    busy = msgspec.structs.replace(candidate("int8", wait_s=0.5), at_stake=0.0)
    assert not decide("slo-utility", situation(busy, objective=objective)).starts


def test_why_not_never_blames_what_the_chosen_one_misses_too():
    """Of two rungs that miss the default TTFT the better one is served late: the other is smaller, and not too slow."""
    slow, sooner = candidate("fp32", remote=True, ttft_s=5.0), candidate("pruned-fp32", remote=True, ttft_s=2.6)
    case = situation(slow, sooner)
    choice = decide(DEFAULT, case)
    assert (choice.candidate, choice.reason) == (slow, "late")
    assert why_not(sooner, slow, case) == ("smaller", "quality 0.75, the chosen one has 1")
    near = candidate("int8", ttft_s=9.0)
    assert why_not(slow, near, situation(near, slow))[0] == "ranked-lower", "the device does not keep it either"


def test_the_tiers_default_is_not_called_a_wish_of_the_caller():
    late = candidate("fp32", remote=True, ttft_s=5.0)
    assert why_not(late, LOCAL, situation(LOCAL, late)) == (
        "ttft",
        "first token within 7500 ms (p90), the default of this tier is 3000 ms",
    )
    asked = why_not(late, LOCAL, situation(LOCAL, late, ttft_promised=True))
    assert asked == ("ttft", "first token within 7500 ms (p90), asked for 3000 ms")
    busy = candidate("int8", wait_s=50.0)
    for promised, told in ((False, "to be kept: this tier's default TTFT 3000 ms"), (True, "to be kept: TTFT 3000 ms")):
        refusal = load_policy(DEFAULT).decide(situation(busy, ttft_promised=promised))
        assert isinstance(refusal, Hopeless)
        assert refusal.why.endswith(told)


def test_a_rung_that_is_too_slow_for_any_useful_answer_is_not_chosen_for_the_deadline():
    slow, quick = candidate("fp32", remote=True, tpot_s=1.0), candidate("pruned-int8", tpot_s=0.1)
    case = situation(slow, quick, objective=Objective(ttft_s=3.0, deadline_s=4.0), answer_tokens=20)
    for policy in (DEFAULT, "slo-utility"):
        assert decide(policy, case).candidate is quick
    assert why_not(slow, quick, case)[0] == "deadline"


def test_cloud_first_prefers_a_good_device_to_a_small_cloud():
    busy = candidate("fp32", remote=True, wait_s=9.0)
    assert decide("cloud-first", situation(LOCAL, busy, CLOUD_SMALL)).candidate is LOCAL
    down = decide("cloud-first", situation(LOCAL, remote_served=True, remote_down=True))
    assert (down.candidate, down.reason) == (LOCAL, "upstream-down")


def test_local_first_steps_down_on_the_device_before_it_leaves():
    case = situation(candidate("int8", wait_s=9.0), SMALL, CLOUD)
    assert decide("local-first", case).candidate is SMALL


def test_smallest_rung_tells_that_it_is_smaller():
    choice = decide("smallest-rung", situation(*ALL))
    assert choice.degraded


TIMES = st.fixed_dictionaries(
    {
        "ttft_s": st.floats(0.001, 20),
        "tpot_s": st.floats(0.001, 1),
        "wait_s": st.sampled_from([0.0, 0.0, 0.4, 5.0, 60.0]),
    }
)
CANDIDATES = st.lists(
    st.builds(
        lambda name, remote, cap, times: candidate(name, remote=remote, window_cap=cap, **times),
        st.sampled_from(["fp32", "int8", "pruned-fp32", "pruned-int8"]),
        st.booleans(),
        st.sampled_from([None, None, 20]),
        TIMES,
    ),
    min_size=1,
    max_size=6,
)


@given(
    candidates=CANDIDATES,
    objective=st.builds(
        Objective,
        ttft_s=st.sampled_from([None, 0.1, 3.0]),
        tpot_s=st.sampled_from([None, 0.05]),
        deadline_s=st.sampled_from([None, 0.1, 5.0, 60.0]),
    ),
    state=st.fixed_dictionaries(
        {
            "ttft_promised": st.booleans(),
            "overloaded": st.booleans(),
            "pinned": st.booleans(),
            "remote_down": st.booleans(),
            "waited_s": st.sampled_from([0.0, 1.0, 10.0]),
            "wait_left_s": st.sampled_from([0.0, 5.0, 30.0]),
            "answer_tokens": st.integers(1, 500),
            "emitted_tokens": st.sampled_from([0, 30]),
            "answer_cap": st.sampled_from([None, 64]),
        }
    ),
    name=st.sampled_from(sorted(POLICIES)),
)
def test_every_choice_is_one_of_the_candidates_and_explained(candidates, objective, state, name):
    case = situation(*candidates, objective=objective, **state)
    decision = load_policy(name).decide(case)
    if isinstance(decision, Hopeless):
        assert 0 < decision.retry_after_s <= 120
        assert decision.why
        return
    assert any(decision.candidate is c for c in candidates)
    assert decision.reason in REASONS
    assert decision.max_tokens is None or decision.max_tokens >= 1
    assert decision.degraded or decision.reason not in {"step-down", "shorter-answer"}
    assert decision.max_tokens is None or decision.degraded or objective.deadline_s is not None


def test_a_slow_model_is_no_reason_to_step_down_for_a_default_that_nobody_asked_for():
    slow = candidate("fp32", remote=True, ttft_s=9.0)
    choice = decide(DEFAULT, situation(slow, SMALL))
    assert (choice.candidate, choice.degraded) == (slow, False)
