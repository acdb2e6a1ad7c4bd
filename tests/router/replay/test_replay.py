"""A log written by the simulator is replayed: under its own policy it must come near what was logged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from overspill import app
from router.base.errors import InvalidRequest
from router.decisions.explain import five_lines
from router.decisions.line import AskedFor, CandidateRow, Decision, Features, encode
from router.decisions.settings import DecisionFileSettings
from router.policy.registry import POLICIES
from router.replay.compare import logged, replayed
from router.replay.log import condense, read_log
from router.replay.world import LEFT, build
from router.simulation.mixes import requests_of
from router.simulation.run import simulate
from router.simulation.traces import at_rate, load_trace, slice_of
from router.simulation.values import SimRequest
from router.simulation.world import two_tiers
from router.values.settings import RouterSettings

OWN = RouterSettings().policy


def write_log(path: Path, mix: str = "proportional", rate_rps: float = 2.0, count: int = 300) -> Path:
    """Have the simulator write a log of the world that it ships with."""
    settings = DecisionFileSettings(path=str(path), max_mbytes=1)
    simulate(two_tiers(), asked(mix, rate_rps, count), RouterSettings(), seed=7, decisions=settings)
    return path


def asked(mix: str = "proportional", rate_rps: float = 2.0, count: int = 300) -> tuple[SimRequest, ...]:
    return requests_of(at_rate(slice_of(load_trace("azure-conv"), count, 3), rate_rps), mix, 3)


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "decisions.jsonl")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["replay", *words])


def row(replica: str = "local/a", **changes) -> CandidateRow:
    fields = {
        "replica": replica,
        "tier": "edge",
        "variant": replica.partition("/")[2],
        "family": "tiny",
        "endpoint": "local",
        "device": "local",
        "rung": 0,
        "quality": 1.0,
        "context_tokens": 2048,
        "available": True,
        "slots": 4,
        "running": 0,
        "prefill_tokens_per_s": 1000.0,
        "decode_tokens_per_s": 50.0,
        "decode_batch_slope": 0.1,
    }
    return CandidateRow(**{**fields, **changes})


def decision(at_s: float = 0.0, **changes) -> Decision:
    fields = {
        "request_id": "r",
        "model": "tiny",
        "prompt_tokens": 100,
        "policy": OWN,
        "objective": AskedFor(default_ttft_ms=2500.0),
        "candidates": (row(chosen=True),),
        "events": (
            {"at_ms": 0.0, "event": "sent", "replica": "local/a"},
            {"at_ms": 100.0, "event": "first_token", "replica": "local/a"},
        ),
        "outcome": "completed",
        "finish_reason": "stop",
        "ttft_ms": 100.0,
        "finish_ms": 480.0,
        "tokens": 20,
        "accepted_unix_s": at_s,
    }
    return Decision(**{**fields, **changes})


def test_speeds_and_links_are_found_again(log_path: Path) -> None:
    built = build(read_log(log_path))
    truth = {(device.name, rung.variant): rung for device in two_tiers().devices for rung in device.rungs}
    for device in built.world.devices:
        real = next(d for d in two_tiers().devices if d.name == device.name)
        assert (device.slots, device.remote) == (real.slots, real.remote)
        for rung in device.rungs:
            true = truth[real.name, rung.variant]
            assert (rung.quality, rung.batch_slope) == (true.quality, true.batch_slope)
            if built.speeds[f"{real.name}/{rung.variant}"].answers >= 50:
                assert rung.step_ms == pytest.approx(true.step_ms, rel=0.2)
                assert rung.prefill_tokens_per_s == pytest.approx(true.prefill_tokens_per_s, rel=0.25)
    cloud = next(device for device in built.world.devices if device.remote)
    true_link = next(device for device in two_tiers().devices if device.remote).link
    assert cloud.link.rtt_ms == pytest.approx(true_link.rtt_ms, rel=0.3)
    assert built.world.noise.sigma == pytest.approx(two_tiers().noise.sigma, abs=0.08)


@pytest.mark.slow
def test_its_own_policy_lands_near_what_was_logged(log_path: Path) -> None:
    """Which of several near-equal configurations of rungs one run follows is chance: so the world that wrote the log is
    run again too, with its speeds declared as they are, as a log shows them, and means of runs are compared.
    """
    log, world = read_log(log_path), two_tiers()
    built, seeds = build(log), range(12)
    world = msgspec.structs.replace(world, noise=msgspec.structs.replace(world.noise, prior_error_sigma=0.0))
    wrote = replayed([simulate(world, asked(), RouterSettings(), seed=seed) for seed in seeds])
    now = replayed([simulate(built.world, built.requests, RouterSettings(), seed=seed) for seed in seeds])
    assert logged(log).requests == 300
    for then in (logged(log), wrote):
        assert now.kept == pytest.approx(then.kept, abs=0.1)
        assert now.refused == pytest.approx(then.refused, abs=0.05)
        assert now.quality == pytest.approx(then.quality, abs=0.06)
    assert now.ttft_p50_s == pytest.approx(wrote.ttft_p50_s, rel=0.3)
    assert now.finish_p50_s == pytest.approx(wrote.finish_p50_s, rel=0.2)
    for place, share in wrote.went.items():
        assert now.went.get(place, 0.0) == pytest.approx(share, abs=0.15)


def test_requests_come_as_they_came(log_path: Path) -> None:
    log = read_log(log_path)
    built = build(log)
    assert built.requests[0].arrival_s == 0.0
    arrivals = [request.arrival_s for request in built.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(log.lasted_s)
    assert all(r.objective.deadline_s is not None for r in built.requests)
    for asked, request in zip(log.requests, built.requests, strict=True):
        assert (request.prompt_tokens, request.prompt_bytes) == (asked.prompt_tokens, asked.prompt_bytes)
        assert request.answer_tokens == asked.tokens if asked.ended else request.answer_tokens >= asked.tokens


@pytest.mark.slow
def test_the_command_compares(log_path: Path) -> None:
    other = next(name for name in POLICIES if name != OWN)
    shown = run(str(log_path), "--policy", other, "--seeds", "1")
    assert shown.exit_code == 0, shown.exception
    header = next(line for line in shown.stdout.splitlines() if line.strip().startswith("logged"))
    assert header.split() == ["logged:", OWN, OWN, other]
    for word in (
        "whole, promises kept",
        "refused",
        "first token, p95",
        "to cloud",
        "What a replay cannot know",
        "caches",
    ):
        assert word in shown.stdout
    assert "300 requests in" in shown.stdout
    told = json.loads(run(str(log_path), "-p", OWN, "--seeds", "1", "--json").stdout)
    assert set(told["replayed"]) == {OWN}
    assert told["logged"]["requests"] == 300
    assert told["note"]


def test_what_cannot_be_replayed_is_a_clear_error(tmp_path: Path, log_path: Path) -> None:
    assert "no decision file" in run(str(tmp_path / "none"), "-p", OWN).exception.message
    assert "'nonsense' is not known" in run(str(log_path), "-p", "nonsense").exception.message
    assert "names none" in run(str(log_path), "-p", ", ").exception.message
    empty = tmp_path / "empty"
    empty.write_bytes(b'{"torn')
    with pytest.raises(InvalidRequest, match=r"0 lines; 1 lines are damaged"):
        read_log(empty)


@pytest.mark.slow
def test_the_tiers_own_settings_are_used(tmp_path: Path, log_path: Path) -> None:
    config = tmp_path / "edge.toml"
    config.write_text("[gateway]\nport = 9000\n[router]\nmax_wait_ms = 1.0\n")
    told = json.loads(run(str(log_path), "-p", OWN, "--seeds", "1", "--json", "--config", str(config)).stdout)
    usual = json.loads(run(str(log_path), "-p", OWN, "--seeds", "1", "--json").stdout)
    assert told["replayed"][OWN]["refused"] > usual["replayed"][OWN]["refused"]
    config.write_text("[router]\nmax_queu = 4\n")
    assert "unknown key" in run(str(log_path), "-p", OWN, "--config", str(config)).exception.message


def test_failovers_are_followed_over_their_replicas() -> None:
    log = condense(
        [
            decision(
                10.0,
                events=(
                    {"at_ms": 5.0, "event": "queued", "waiting": 1},
                    {"at_ms": 50.0, "event": "sent", "replica": "local/a"},
                    {"at_ms": 60.0, "event": "attempt_failed", "replica": "local/a", "code": "replica_failed"},
                    {"at_ms": 60.0, "event": "sent", "replica": "local/b"},
                    {"at_ms": 160.0, "event": "first_token", "replica": "local/b"},
                    {"at_ms": 480.0, "event": "finished"},
                ),
                candidates=(row("local/b", chosen=True), row(rejected="already-failed")),
            )
        ]
    )
    (request,) = log.requests
    assert [(a.replica, a.first_s, a.ended_s) for a in request.attempts] == [
        ("local/a", None, pytest.approx(10.06)),
        ("local/b", pytest.approx(10.16), pytest.approx(10.48)),
    ]
    assert request.variant == "b"
    assert set(log.replicas) == {"local/a", "local/b"}
    assert log.default_ttft_s == 2.5


def test_of_a_hedge_the_sooner_one_served() -> None:
    events = (
        {"at_ms": 0.0, "event": "sent", "replica": "local/a"},
        {"at_ms": 50.0, "event": "hedged", "replica": "local/b", "beside": "local/a"},
        {"at_ms": 90.0, "event": "hedge_won", "replica": "local/b"},
        {"at_ms": 90.0, "event": "first_token", "replica": "local/b"},
    )
    told = decision(candidates=(row(), row("local/b", chosen=True)), events=events)
    (request,) = condense([told]).requests
    assert [(a.replica, a.first_s, a.ended_s) for a in request.attempts] == [
        ("local/a", None, pytest.approx(0.09)),
        ("local/b", pytest.approx(0.09), pytest.approx(0.48)),
    ]
    assert request.variant == "b"
    assert five_lines(told)[1].startswith("went       to local/b, the sooner of two that were asked")


def test_what_is_not_comparable_is_told_apart() -> None:
    log = condense(
        [
            decision(0.0),
            decision(1.0, outcome="cancelled", finish_reason=None, tokens=3),
            decision(2.0, outcome="invalid"),
            decision(3.0, outcome="shed", events=(), tokens=0, finish_reason=None, kept={"ttft": False}),
            decision(4.0, outcome="degraded", cut=True, finish_reason="length", kept={"deadline": True}),
            decision(5.0, accepted_unix_s=None),
        ]
    )
    assert (len(log.requests), log.invalid) == (4, 1)
    figures = logged(log)
    assert (figures.requests, figures.kept, figures.refused) == (3, pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert figures.went == {"edge a": pytest.approx(2 / 3), "nowhere": pytest.approx(1 / 3)}
    built = build(log)
    assert [request.kind for request in built.requests] == ["", LEFT, "", ""]


def test_an_upstream_that_was_never_reached_is_no_device() -> None:
    unknown = row("upstream x", prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0, context_tokens=0)
    log = condense([decision(candidates=(row(chosen=True), unknown)), decision(1.0)])
    assert [device.name for device in build(log).world.devices] == ["local"]


def test_rungs_of_one_device_share_it_and_odd_names_are_made_fit() -> None:
    url = "https://cloud.example:8700"
    remote = {"endpoint": url, "device": f"{url}/gpu 0", "remote": True, "tier": "cloud", "slots": 8}
    link = {"rtt_ms": 30.0, "uplink_bytes_per_s": 1_250_000.0}
    candidates = (
        row("c/small model", variant="small model", rung=1, quality=0.7, **remote, **link),
        row("c/large", rung=0, **remote, **link),
        row("c/other", **{**remote, "device": f"{url}/gpu:0"}, **link),
    )
    world = build(condense([decision(candidates=candidates), decision(1.0, candidates=candidates)])).world
    first, second = world.devices
    assert first.name != second.name
    assert [rung.variant for rung in first.rungs] == ["large", "small-model"]
    assert (first.slots, first.remote, first.endpoint) == (8, True, url)
    assert (first.link.rtt_ms, first.link.uplink_mbps) == (pytest.approx(30.0), pytest.approx(10.0))


def test_a_log_without_answers_keeps_the_declared_speeds() -> None:
    refused = decision(outcome="shed", events=(), tokens=0, finish_reason=None, ttft_ms=None)
    built = build(condense([refused, decision(1.0, outcome="shed", events=(), tokens=0, finish_reason=None)]))
    (device,) = built.world.devices
    assert device.rungs[0].step_ms == pytest.approx(20.0)
    assert device.rungs[0].prefill_tokens_per_s == pytest.approx(1000.0)
    assert built.speeds["local/a"].answers == 0
    assert built.world.noise.sigma == 0.0


def test_sessions_and_callers_stay_together() -> None:
    log = condense([decision(float(i), features=Features(session=f"h-{i % 2}", caller="h-c")) for i in range(4)])
    built = build(log)
    assert [request.objective.session for request in built.requests] == ["h-0", "h-1", "h-0", "h-1"]
    assert {request.caller for request in built.requests} == {"h-c"}


def test_figures_of_nothing_are_not_numbers() -> None:
    figures = logged(condense([decision(outcome="shed", events=(), ttft_ms=None, tokens=0)]))
    assert math.isnan(figures.ttft_p50_s)
    assert math.isnan(figures.quality)


def test_lines_survive_the_file(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(encode(decision(1.0)) + encode(decision(0.0)) + b'{"torn')
    log = read_log(tmp_path / "log")
    assert [request.accepted_s for request in log.requests] == [0.0, 1.0]
    assert log.skipped == 1
