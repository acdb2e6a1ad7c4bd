"""The pure parts of the benchmarks over real tiers: workload, outcomes, links, fits and comparisons."""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.hybrid import SYSTEMS, block_row, draw, order_of, summary
from benchmarks.links import shapes_of, synthetic
from benchmarks.live.calibration import RungFit, TierFit, fit_line, fit_rung, repeated_noise, step_s, world_of
from benchmarks.live.client import Seen
from benchmarks.live.cpu_share import CpuShare
from benchmarks.live.litellm import configuration
from benchmarks.live.namespace import STEP_S, rates_bps
from benchmarks.live.relay import LinkShape, Passage
from benchmarks.live.workload import OPEN_CAP_TOKENS, Ask, Promises, Scale, asks_of, rows_of
from benchmarks.live_calibration import cells_of, judged_of
from benchmarks.sim_vs_live import compare, mean_of, outcome_of, sim_figures, sim_request
from router.simulation.network import Bandwidth
from router.simulation.run import simulate
from router.values.request import Objective

SCALE, PROMISES = Scale(rate_rps=2.0), Promises()


def asks(count: int = 60, salt: str = "a") -> list[Ask]:
    return asks_of(rows_of("azure-conv", count, 3, SCALE), 3, salt, PROMISES)


def ask(**changes: object) -> Ask:
    plain = Ask(0.0, {}, 50, 24, open_length=True, kind="proportional", objective=Objective(deadline_s=5.0))
    return replace(plain, **changes)  # type: ignore[arg-type]


def seen(of: Ask, **changes: object) -> Seen:
    values = {"status": 200, "first_s": 1.0, "last_s": 3.0, "tokens": 24, "finish": "stop", **changes}
    return Seen(of, **values)  # type: ignore[arg-type]


def test_everyone_who_is_compared_meets_the_same_arrivals_lengths_and_promises() -> None:
    one, other = asks(salt="a"), asks(salt="b")
    assert [replace(a, body={}) for a in one] == [replace(b, body={}) for b in other]
    assert [a.body for a in one] == [a.body for a in asks(salt="a")]
    assert [a.body["prompt"] for a in one] != [b.body["prompt"] for b in other]  # nobody's prefixes help the next


def test_an_open_length_is_told_nobody_and_a_capped_one_is_exact() -> None:
    for one in asks():
        if one.open_length:
            assert one.body["max_tokens"] == OPEN_CAP_TOKENS
            assert "ignore_eos" not in one.body
            assert one.headers["x-overspill-min-quality"] == "0.9"
        else:
            assert (one.body["max_tokens"], one.body["ignore_eos"]) == (one.answer_tokens, True)


def test_the_stop_string_is_the_number_after_the_last_of_the_answer() -> None:
    for one in asks():
        listed = [int(number) for number in str(one.body["prompt"]).strip(",").split(", ")]
        assert listed == list(range(listed[0], listed[0] + len(listed)))
        assert one.prompt_tokens == 5 * len(listed)
        if one.open_length:
            (stop,) = one.body["stop"]  # type: ignore[misc]
            answered = int(stop) - listed[-1] - 1
            assert one.answer_tokens == 5 * answered + 4
            assert int(stop) <= 999  # of three digits to the end, or the token count would be off


def test_every_request_asks_for_something() -> None:
    assert all(set(one.headers) - {"x-overspill-min-quality"} for one in asks())
    assert {one.kind for one in asks()} == {"proportional", "one-deadline", "ttft-tpot"}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "kept"),
        ({"last_s": 6.0}, "late"),
        ({"finish": "length"}, "cut"),
        ({"status": 503, "finish": ""}, "refused"),
        ({"status": 429, "finish": ""}, "refused"),
        ({"status": 500, "finish": ""}, "failed"),
        ({"error": "the stream broke"}, "failed"),
        ({"finish": ""}, "failed"),
    ],
)
def test_only_a_whole_answer_in_time_is_kept(changes: dict[str, object], outcome: str) -> None:
    assert seen(ask(), **changes).outcome == outcome


def test_a_capped_answer_is_whole_with_all_of_its_tokens() -> None:
    capped = ask(open_length=False)
    assert seen(capped, finish="length").whole
    assert not seen(capped, finish="length", tokens=23).whole


def test_ttft_and_tpot_are_promises_too() -> None:
    asked = ask(objective=Objective(ttft_s=1.5, tpot_s=0.1))
    assert seen(asked).kept
    assert not seen(asked, first_s=1.6).kept
    assert not seen(asked, last_s=1.0 + 0.101 * 23).kept


def test_systems_come_in_turns() -> None:
    orders = [order_of(SYSTEMS, block) for block in range(len(SYSTEMS))]
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(SYSTEMS))}
    assert {order[0] for order in orders} == set(SYSTEMS)


def test_a_summary_counts_what_was_kept_by_quality() -> None:
    quality = {"large": 1.0, "small": 0.5}
    row = block_row(
        "hybrid",
        0,
        [seen(ask(), variant="large"), seen(ask(), variant="small"), seen(ask(), variant="small", last_s=9.0)],
        quality,
    )
    got = summary("hybrid", [{**row, "cloud_tokens": 30}], block_s=10.0)
    assert (got["goodput_per_s"], got["quality_goodput_per_s"]) == (0.2, 0.15)
    assert got["shares"]["late"] == pytest.approx(1 / 3, abs=1e-4)
    assert (got["cloud_tokens_per_kept"], got["served_by"]) == (15.0, {"large": 1, "small": 2})


@pytest.mark.process  # matplotlib may look for fonts with one
def test_the_picture_is_drawn_of_whatever_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {**block_row("hybrid", 0, [seen(ask(), variant="large")], {"large": 1.0}), "cloud_tokens": 3}
    refused = block_row("litellm", 0, [seen(ask(), status=503, first_s=None)], {})
    systems = [summary("hybrid", [row], 10.0), summary("litellm", [{**refused, "cloud_tokens": 0}], 10.0)]
    plan = {"rate_rps": 2.0, "blocks": 1, "block_s": 10.0}
    result = {"model": "m", "edge_share_of_core": 0.4, "load": 1.25, "plan": plan, "systems": systems}
    draw(result, tmp_path / "hybrid.json")
    assert (tmp_path / "hybrid.svg").read_text().startswith("<?xml")


def test_litellm_gets_both_tiers_its_latency_strategy_and_fallbacks() -> None:
    made = json.loads(json.dumps(configuration("http://edge", "http://cloud")))
    bases = [entry["litellm_params"]["api_base"] for entry in made["model_list"] if entry["model_name"].startswith("s")]
    assert bases == ["http://edge/v1", "http://cloud/v1"]
    assert made["router_settings"]["routing_strategy"] == "latency-based-routing"
    assert made["general_settings"]["forward_client_headers_to_llm_api"]


def link(**changes: object) -> LinkShape:
    plain = LinkShape("test", Bandwidth.constant(1.0), Bandwidth.constant(4.0), 0.1, 0.0)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_piece_takes_half_a_round_trip_and_its_bandwidth() -> None:
    assert Passage(link(), None, 1).leaves_s(2.0, 125_000) == pytest.approx(2.05)
    assert Passage(link(), Bandwidth.constant(1.0), 1).leaves_s(2.0, 125_000) == pytest.approx(3.05)


def test_pieces_share_the_bandwidth() -> None:
    way = Passage(link(), Bandwidth.constant(1.0), 1)
    assert [way.leaves_s(0.0, 12_500) for _ in range(3)] == pytest.approx([0.15, 0.25, 0.35])


def test_nothing_passes_a_cut_and_nothing_is_lost_in_it() -> None:
    way = Passage(link(cuts_s=((1.0, 3.0),)), None, 1)
    assert way.leaves_s(0.5, 10) == pytest.approx(0.55)
    assert way.leaves_s(1.0, 10) == pytest.approx(3.05)
    assert way.leaves_s(3.0, 10) == pytest.approx(3.05)


def test_jitter_is_around_the_round_trip() -> None:
    way = Passage(link(jitter=0.3), None, 1)
    delays_s = sorted(way.leaves_s(0.0, 10) for _ in range(999))
    assert delays_s[499] == pytest.approx(0.05, rel=0.05)
    assert delays_s[949] == pytest.approx(0.05 * math.exp(0.3 * 1.645), rel=0.1)


def test_rates_follow_the_trace_and_are_never_nothing() -> None:
    times_s = [0.0, STEP_S, 2 * STEP_S]
    up = Bandwidth(times_s, [0.0, 1e6 * STEP_S, 1e6 * STEP_S])
    assert rates_bps(link(up=up), 0.0) == (1_000_000, 4_000_000)
    assert rates_bps(link(up=up), STEP_S) == (2_000, 4_000_000)


def test_the_built_in_link_is_always_the_same_and_has_fades_and_cuts() -> None:
    one, other = synthetic(), synthetic()
    rates = [rates_bps(one, at) for at in range(120)]
    assert rates == [rates_bps(other, at) for at in range(120)]
    assert min(up for up, _ in rates) < 0.2e6
    assert max(up for up, _ in rates) > 1e6
    assert one.cuts_s


def test_traces_are_read_by_path(tmp_path: Path) -> None:
    packets, rates = tmp_path / "a.up", tmp_path / "b.csv"
    packets.write_text("0\n500\n999\n")
    rates.write_text("trace,t_s,mbps\nbus,0,2\nbus,1,4\n")
    given = argparse.Namespace(lte=[str(packets), str(packets)], hsdpa=[str(rates), "bus"])
    lte, umts, built_in = shapes_of(given)
    assert lte.up.bits_until(1.0) == pytest.approx(3 * 12_000)
    assert umts.down.bits_until(2.0) == pytest.approx(6e6)
    assert umts.up.bits_until(2.0) == pytest.approx(1.5e6)
    assert built_in.name == "synthetic"


def test_a_line_is_found_again_under_noise() -> None:
    dice = random.Random(1)
    points = [(x, (0.03 + 0.002 * x) * math.exp(dice.gauss(0, 0.05))) for x in (50.0, 150.0, 300.0, 450.0) * 20]
    line = fit_line(points)
    assert line.slope == pytest.approx(0.002, rel=0.05)
    assert line.fixed == pytest.approx(0.03, rel=0.2)


def test_a_line_through_less_than_nothing_begins_at_nothing() -> None:
    assert fit_line([(50.0, 0.05), (450.0, 0.95)]).fixed == 0.0
    with pytest.raises(ValueError, match="two different x"):
        fit_line([(50.0, 0.1), (50.0, 0.2)])


def test_noise_is_that_of_long_prompts_and_not_what_a_line_misses() -> None:
    """Times bend, and short prompts wait some milliseconds for a wake-up; long ones vary by a tenth of their time."""
    dice = random.Random(2)
    alone = [
        (tokens, (0.05 + (tokens / 400) ** 1.5) * math.exp(dice.gauss(0, 0.1)) + abs(dice.gauss(0, 0.02)))
        for tokens in (50, 150, 300, 450) * 50
    ]
    assert repeated_noise(alone) == pytest.approx(0.1, rel=0.15)
    assert repeated_noise([(50, 0.1), (50, 0.1), (450, 0.9)]) == 0.0
    with pytest.raises(ValueError, match=r"asked twice; got \[50, 450\] once each"):
        repeated_noise([(50, 0.1), (450, 0.9)])


def fits() -> list[RungFit]:
    alone = [(tokens, 0.02 + tokens / 500) for tokens in (50, 150, 300)] * 2
    steps = {batch: 0.025 * (1 + 0.2 * (batch - 1)) for batch in (1, 2, 4)}
    return [fit_rung("a-int8", alone, steps), fit_rung("a-fp32", alone, steps)]


EDGE, CLOUD = (4, TierFit(0.75, 0.25, 0.9)), (8, TierFit(0.9, 0.5, 0.8))


def together(begins_s: float, first_s: float, pace_s: float, tokens: int) -> Seen:
    """An answer of single characters, one a token, which is how numbers are written."""
    times_s = [first_s + k * pace_s for k in range(tokens)]
    marks = [(at_s, count + 1) for count, at_s in enumerate(times_s)]
    return seen(
        ask(), began_s=begins_s, first_s=first_s, last_s=times_s[-1], tokens=tokens, text="7" * tokens, marks=marks
    )


def test_a_step_is_counted_only_while_all_of_them_decode() -> None:
    """The first decodes twice as fast until the second comes, and again after it."""
    early = together(0.0, 1.0, 0.05, 21)
    early.marks += [(2.1 + 0.1 * k, 22 + k) for k in range(11)]
    early.tokens, early.text, early.last_s = 32, "7" * 32, 3.1
    late = together(0.5, 1.5, 0.1, 11)
    assert step_s([early, late]) == pytest.approx(0.1)


def test_answers_that_never_run_at_once_are_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="never ran at once"):
        step_s([together(0.0, 0.1, 0.01, 5), together(5.0, 0.1, 0.01, 5)])


def record(**changes: object) -> dict[str, object]:
    row = {
        "tier": "edge",
        "replica": "e",
        "chosen": True,
        "free": True,
        "ttft_ms": 400.0,
        "ttft_high_ms": 600.0,
        "tpot_ms": 50.0,
    }
    rest = {"tpot_high_ms": 80.0, "finish_ms": 1500.0, "finish_high_ms": 2400.0}
    return {"candidates": [{**row, **rest}], "events": [{"event": "sent", "replica": "e", "at_ms": 500.0}], **changes}


def test_an_answer_is_judged_by_what_was_told_when_it_was_bound() -> None:
    judged = judged_of(seen(ask(), first_s=1.0, last_s=3.3, tokens=24), record())
    assert judged is not None
    row = cells_of([judged])["edge"].row()
    assert (row["ttft_kept"], row["tpot_kept"], row["finish_kept"]) == (1.0, 0.0, 0.0)
    assert row["ttft_mape"] == pytest.approx(0.2)


def test_a_cut_answer_is_judged_by_the_time_it_would_have_taken() -> None:
    """Half of it after 1.15 s at 50 ms a token: all of it would have taken 0.5 + 23 · 0.1 s."""
    judged = judged_of(seen(ask(), first_s=1.0, last_s=2.1, tokens=12, finish="length"), record())
    assert judged is not None
    cell = cells_of([judged])["edge"]
    assert cell.row()["finish_mape"] == pytest.approx(abs(1.5 / 2.8 - 1), abs=1e-3)
    assert "finish_of_whole" not in cell.kept


def test_what_was_sent_twice_or_never_answered_is_not_judged() -> None:
    twice = record(events=[{"event": "sent", "replica": name, "at_ms": 1.0} for name in ("c", "e")])
    hedged = record(events=[{"event": "sent", "replica": "c", "at_ms": 1.0}])
    assert judged_of(seen(ask()), hedged) is None
    assert judged_of(seen(ask()), twice) is None
    assert judged_of(seen(ask(), first_s=None), record()) is None
    assert judged_of(seen(ask()), {}) is None


def test_a_rung_is_fitted_and_becomes_the_world_that_was_measured() -> None:
    world = world_of(fits(), {"a-int8": 0.9, "a-fp32": 1.0}, EDGE, CLOUD)
    edge, cloud = world.devices
    assert (edge.slots, cloud.slots, cloud.remote) == (4, 8, True)
    assert edge.rungs[0].prefill_s(100) == pytest.approx(0.22)
    assert edge.rungs[0].step_s(4) == pytest.approx(0.04)
    assert world.noise.prior_error_sigma == 0.0  # the live tiers have learnt their speeds too


def test_the_simulated_side_gets_the_same_requests_and_is_told_in_the_same_words() -> None:
    world = world_of(fits(), {"a-int8": 0.95, "a-fp32": 1.0}, EDGE, CLOUD)
    requests = [sim_request(one) for one in asks(30)]
    assert all(request.asked_tokens == one.answer_tokens for request, one in zip(requests, asks(30), strict=True))
    rows = simulate(world, requests, seed=1).rows
    figures = sim_figures(rows)
    assert sum(figures[key] for key in figures if key.startswith("share_")) == pytest.approx(1.0, abs=1e-3)
    assert {outcome_of(row) for row in rows} <= {"kept", "late", "cut", "refused"}


def test_differences_are_told_and_judged() -> None:
    live = {"ttft_ms_p50": 100.0, "share_kept": 0.9, "share_cut": 0.1, "served_by": {"a": 1.0}}
    sim = mean_of([{**live, "ttft_ms_p50": 111.0, "share_kept": 0.93, "share_cut": 0.05}] * 2)
    rows = {row["figure"]: row for row in compare(live, sim)}
    assert (rows["ttft_ms_p50"]["difference"], rows["ttft_ms_p50"]["within"]) == (0.11, False)
    assert rows["share_kept"]["within"]
    assert not rows["share_cut"]["within"]


def group_in(root: Path) -> Path:
    (group,) = (path for path in root.iterdir() if path.is_dir())
    return group


async def test_a_tier_with_a_share_of_a_core_is_started_in_a_group_with_that_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.cfs_quota_us").write_text("-1")
    monkeypatch.setattr("benchmarks.live.cpu_share._ROOTS", (tmp_path,))
    async with CpuShare(0.4) as device:
        group = group_in(tmp_path)
        quota_us, period_us = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        assert quota_us / period_us == pytest.approx(0.4)
        assert device.limited
        assert str(group) in device.prefix[2]
        (group / "cgroup.procs").write_text("")


async def test_without_a_controller_a_tier_has_all_of_its_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.live.cpu_share._ROOTS", (tmp_path / "none",))
    async with CpuShare(0.4) as device:
        assert (device.limited, device.prefix) == (False, ())
