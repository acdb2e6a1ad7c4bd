"""`benchmarks.routing`: its JSON, what it keeps of a run that was ended, and the peers that it compares with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.routing import FAIRNESS, PEERS, Cell, Job, Outcome, _behind, _fairness, _rows
from router.policy.registry import POLICIES
from router.simulation.experiment import CLAIRVOYANT
from router.simulation.run import Result, simulate
from router.simulation.values import SimRequest, SimRow
from router.simulation.world import DeviceSpec, NoiseSpec, RungSpec, World
from router.values.request import Objective
from router.values.settings import Fairness, RouterSettings


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in PEERS.items():
        monkeypatch.setitem(POLICIES, name, module)


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["routing", *arguments])
    return routing.main()


def test_a_run_writes_rows_and_goes_on_where_it_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peers: None
) -> None:
    monkeypatch.setattr(routing, "STORE", tmp_path)
    policies = ["slo-utility", "late-binding-earliest-deadline", "late-binding-value-density-known"]
    asked = ["--trace", "azure-code", "--mix", "proportional", "mixture", "--load", "0.9", "3", "--seeds", "0", "1"]
    asked += ["--policy", *policies, "--requests", "40", "--jobs", "1", "--json", str(tmp_path / "routing.json")]
    assert _main(monkeypatch, *asked) == 0
    first = json.loads((tmp_path / "routing.json").read_text())
    assert {tuple(row) for row in first["rows"]} == {("trace", "mix", "load", "policy", "share", "spread")}
    assert len(first["rows"]) == 2 * 2 * 4
    assert all(0 < row["share"] <= 1.0001 for row in first["rows"])
    assert {row["policy"] for row in first["rows"]} == {CLAIRVOYANT, *policies}
    assert {(row["policy"], row["load"]) for row in first["fairness"]} == {
        (policy, load) for policy in (CLAIRVOYANT, *policies) for load in (0.9, 3.0)
    }
    assert first["meta"]["requests"] == 40
    assert "azure-code · mixture" in capsys.readouterr().out

    (store,) = (tmp_path / "bench-routing").iterdir()
    lines = store.read_text().splitlines(keepends=True)
    store.write_text("".join(lines[:-2]) + lines[-2][:30])  # ended in the middle of a line
    ran: list[Job] = []
    really = routing.run_job
    monkeypatch.setattr(routing, "run_job", lambda job: ran.append(job) or really(job))
    assert _main(monkeypatch, *asked) == 0
    assert len(ran) == 2, "the two that were lost, and no other"
    again = json.loads((tmp_path / "routing.json").read_text())
    assert again["rows"] == first["rows"]


def test_fairness_is_compared_with_none_and_two_tenants_share_a_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peers: None
) -> None:
    monkeypatch.setattr(routing, "STORE", tmp_path)
    asked: list[tuple[str, Fairness, set[str]]] = []

    def seen(world: World, requests: list[SimRequest], settings: RouterSettings, *, seed: int) -> Result:
        asked.append((settings.policy, settings.fairness, {request.caller for request in requests}))
        return simulate(world, requests, settings, seed=seed)

    monkeypatch.setattr(routing, "simulate", seen)
    policies = ["slo-utility", "slo-utility+fair"]
    arguments = ["--trace", "azure-code", "--mix", "proportional", "--load", "3", "--seeds", "0", "--policy", *policies]
    path = tmp_path / "routing.json"
    assert _main(monkeypatch, *arguments, "--requests", "40", "--jobs", "1", "--json", str(path)) == 0
    fair = FAIRNESS["slo-utility+fair"]
    assert [policy for policy, _, _ in asked] == ["slo-utility"] * 4
    assert [fairness for _, fairness, _ in asked] == [Fairness(), fair] * 2
    assert [callers for _, _, callers in asked] == [{""}] * 2 + [{"big", "small"}] * 2
    found = json.loads(path.read_text())
    assert {row["policy"] for row in found["rows"]} == {CLAIRVOYANT, *policies}
    assert {row["mix"] for row in found["rows"]} == {"proportional"}
    assert [row["policy"] for row in found["tenants"]] == policies
    assert all(0 <= row["kept_small"] <= 1 for row in found["tenants"])
    assert "two tenants" in capsys.readouterr().out


def _outcomes(shares: dict[str, tuple[float, ...]]) -> dict[Job, Outcome]:
    return {
        Job(Cell("t", "m", 2.0, seed), policy, 10, ""): Outcome(
            share * 50, 50.0 * (policy == CLAIRVOYANT), share, 0, 0, 0
        )
        for policy, of in shares.items()
        for seed, share in enumerate(of)
    }


def test_share_is_of_each_seeds_own_bound_and_spread_their_deviation() -> None:
    rows = {row["policy"]: row for row in _rows(_outcomes({CLAIRVOYANT: (0.8, 0.9), "a": (0.5, 0.7)}))}
    assert rows["a"]["share"] == pytest.approx(0.6)
    assert rows["a"]["spread"] == pytest.approx(0.1, abs=1e-4)
    assert [row["kept"] for row in _fairness(_outcomes({"a": (0.5, 0.7)}))] == [0.6]


@pytest.mark.parametrize(("own", "behind"), [((0.5, 0.52), True), ((0.6, 0.62), False), ((0.7, 0.72), False)])
def test_the_default_is_behind_by_more_than_the_spread(own: tuple[float, float], behind: bool) -> None:
    outcomes = _outcomes({CLAIRVOYANT: (0.9, 0.9), "slo-utility": own, "other": (0.58, 0.66)})
    assert bool(_behind(_rows(outcomes))) == behind


def _served(policy: str, *requests: SimRequest) -> list[int]:
    """Positions of the requests, in order of their first tokens, on one slot of known speed."""
    rung = RungSpec(variant="only", quality=1.0, prefill_tokens_per_s=1000, step_ms=20)
    world = World(
        devices=(DeviceSpec(name="edge", slots=1, rungs=(rung,)),), noise=NoiseSpec(sigma=0, prior_error_sigma=0)
    )
    rows = simulate(world, requests, RouterSettings(policy=policy)).rows
    began = [row for row in rows if row.ttft_s is not None]
    return [row.index for row in sorted(began, key=_first_token_s)]


def _first_token_s(row: SimRow) -> float:
    assert row.ttft_s is not None
    return row.arrival_s + row.ttft_s


def test_peers_order_by_deadline_or_by_density(peers: None) -> None:
    busy = SimRequest(0.0, 100, 100, Objective(deadline_s=60.0), max_tokens=100)
    long_soon = SimRequest(0.1, 1000, 300, Objective(deadline_s=20.0), max_tokens=300)
    short_later = SimRequest(0.2, 100, 20, Objective(deadline_s=50.0), max_tokens=20)
    asked = (busy, long_soon, short_later)
    assert _served("late-binding-earliest-deadline", *asked) == [0, 1, 2]
    assert _served("late-binding-value-density", *asked) == [0, 2, 1]
    assert _served("late-binding-value-density-known", *asked) == [0, 2, 1]
    assert _served("late-binding-expected-value", *asked) == [0, 2, 1]


def test_a_peer_drops_what_cannot_be_kept_any_more(peers: None) -> None:
    lost = SimRequest(0.0, 100, 200, Objective(deadline_s=1.0), max_tokens=200)
    kept = SimRequest(0.1, 100, 20, Objective(deadline_s=5.0), max_tokens=20)
    assert _served("late-binding-value-density-known", lost, kept) == [1]
