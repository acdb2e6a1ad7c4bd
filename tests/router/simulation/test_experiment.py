"""`overspill simulate`: the same requests for every policy, shares of the bound, what is said of wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.base.errors import ConfigError, OverspillError
from router.policy.registry import POLICIES
from router.simulation.cli import app
from router.simulation.experiment import BOUND, CLAIRVOYANT, NOBODY, Experiment, cells_of, requests_for, runs_of
from router.simulation.mixes import MIXES
from router.simulation.world import SHIPPED, find_world, two_tiers
from tests.support.paths import REPOSITORY

SMALL = ("-n", "30", "--seeds", "2", "-j", "1")


def simulate(*arguments: str) -> str:
    """Run the command in this process; what it raises is raised here."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False, standalone_mode=False)
    return done.output


def experiment(**changes) -> Experiment:
    fields = {
        "world": two_tiers(),
        "trace": "azure-conv",
        "mix": "proportional",
        "policies": ("slo-utility", "local-first"),
        "loads": (0.5, 5.0),
        "seeds": 2,
        "requests": 40,
    }
    return Experiment(**{**fields, **changes})


def test_every_policy_meets_the_same_requests_and_a_load_is_what_it_says() -> None:
    asked = experiment(requests=400)
    assert requests_for(asked, 2.0, 1) == requests_for(asked, 2.0, 1)
    slow, fast = (requests_for(asked, load, 1)[-1].arrival_s for load in (1.0, 4.0))
    assert slow / fast == pytest.approx(4.0)
    assert requests_for(asked, 1.0, 0) != requests_for(asked, 1.0, 1)


@pytest.mark.slow
def test_no_policy_is_above_the_bound_nor_below_nothing() -> None:
    asked = experiment(bound=True)
    runs = list(runs_of(asked, 1))
    assert len(runs) == len(asked.tasks()) == 2 * 4 * 2
    cells = {(cell.load, cell.policy): cell for cell in cells_of(asked, runs)}
    assert set(cells) == {(load, name) for load in (0.5, 5.0) for name in (*asked.policies, BOUND, CLAIRVOYANT)}
    for (load, _), cell in cells.items():
        assert 0.0 < cell.share <= 1.0 + 1e-6
        assert cell.share <= cells[load, BOUND].share + 1e-6
    for cell in cells_of(asked, runs):
        if cell.policy in asked.policies:
            assert sum(cell.served.values()) == pytest.approx(1.0)
            assert cell.served.get(NOBODY, 0.0) == pytest.approx(1.0 - cell.whole)
            assert sum(cell.outcomes.values()) == pytest.approx(1.0)


def test_the_command_prints_a_row_for_each_policy_and_writes_all_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    shown = simulate(
        "two_tiers", *SMALL, "--policy", "slo-utility,cloud-first", "--load", "0.5,2", "--json", str(figures)
    )
    for title in ("load 0.5: azure-conv, proportional, 2 × 30 requests", "load 2:", "of all value"):
        assert title in shown
    assert shown.count("slo-utility") == shown.count("cloud-first") == 2
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert [(row["load"], row["policy"]) for row in found["rows"]] == [
        (0.5, "slo-utility"), (0.5, "cloud-first"), (2.0, "slo-utility"), (2.0, "cloud-first"),
    ]  # fmt: skip
    assert list(found["rows"][0])[:6] == ["trace", "mix", "load", "policy", "share", "spread"]


def test_json_to_stdout_is_nothing_but_json() -> None:
    shown = CliRunner().invoke(app, ["two_tiers", *SMALL, "--load", "1", "--json", "-"], standalone_mode=False)
    assert [row["policy"] for row in json.loads(shown.stdout)["rows"]] == [two_tiers().router.policy]


@pytest.mark.slow
@pytest.mark.process  # matplotlib may look for fonts with one
def test_plots_and_a_page_that_needs_no_other_file(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    simulate("two_tiers", *SMALL, "--load", "0.5,2", "--bound", "--out", str(out))
    names = {path.name for path in out.iterdir()}
    assert {"goodput.png", "latency.png", "quality.png", "decisions.png", "simulation.html"} <= names
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in names if name.endswith(".png"))
    page = (out / "simulation.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page.replace("http://cloud", "")
    assert "clairvoyant-greedy" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.toml",), "neither a file nor one of two_tiers"),
        (("two_tiers", "--policy", "best"), "'best' is not known; known: "),
        (("two_tiers", "--mix", "all"), "'all' is not known; known: proportional"),
        (("two_tiers", "--trace", "none.csv"), "neither a file nor one of azure-conv"),
        (("two_tiers", "--load", "0.5,fast"), "'fast' is no load"),
        (("two_tiers", "--load", "-1"), "'-1' is no load"),
        (("two_tiers", "--load", ","), "--load is empty"),
        (("two_tiers", "-n", "10000000"), "10000000 asked for, the trace has"),
    ],
)
def test_wrong_arguments_are_told_before_the_first_run(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(OverspillError, match=message):
        simulate(*arguments)


def test_a_key_that_a_world_does_not_know_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "world.toml"
    text = (SHIPPED / "two_tiers.toml").read_text(encoding="utf-8")
    path.write_text(text.replace("step_ms = 8", "step_s = 8", 1), encoding="utf-8")
    line = text.splitlines().index("step_ms = 8") + 1
    with pytest.raises(ConfigError, match=rf"world\.toml:{line}: unknown key `device\[0\]\.rung\[1\]\.step_s`"):
        find_world(str(path))
    path.write_text(text + '\n[router]\npolicy = "cloud-first"\n', encoding="utf-8")
    assert find_world(str(path)).router.policy == "cloud-first"


def test_the_example_is_the_shipped_world() -> None:
    assert find_world(str(REPOSITORY / "examples" / "worlds" / "two_tiers.toml")) == two_tiers()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mix", MIXES)
def test_every_policy_serves_every_mix(policy: str, mix: str) -> None:
    asked = experiment(policies=(policy,), mix=mix, loads=(1.2,), seeds=1, requests=60)
    (cell,) = cells_of(asked, list(runs_of(asked, 1)))
    assert cell.share > 0.0
    assert cell.outcomes.get("failed", 0.0) == 0.0
