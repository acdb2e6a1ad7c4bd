"""Faults of a simulated world: what they do to requests, and what the tier makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.base.errors import ConfigError
from router.simulation.run import simulate
from router.simulation.values import SimRequest
from router.simulation.world import (
    Cut,
    DeadReplica,
    DeviceSpec,
    Faults,
    LinkSpec,
    NoiseSpec,
    PowerMode,
    RungSpec,
    SlowLink,
    World,
    load_world,
)
from router.values.request import Locality, Objective
from router.values.settings import RouterSettings

SURE = NoiseSpec(sigma=0.0, prior_error_sigma=0.0)
LARGE = RungSpec(variant="large", quality=1.0, prefill_tokens_per_s=1000, step_ms=10, batch_slope=0.5)
EDGE = DeviceSpec(name="edge", slots=2, rungs=(LARGE,))
CLOUD = DeviceSpec(name="cloud", slots=2, rungs=(LARGE,), remote=True, link=LinkSpec(rtt_ms=40, uplink_mbps=8))
CLOUD_ONLY = Objective(locality=Locality.CLOUD_ONLY)


def world(*devices: DeviceSpec, **faults: tuple) -> World:
    return World(devices=devices, noise=SURE, faults=Faults(**faults))


def test_a_slower_power_mode_stretches_what_runs_from_its_begin_to_its_end() -> None:
    """Ten steps of 10 ms after 0.1 s: from 0.15 to 0.35 at half the speed."""
    slow = world(EDGE, power_mode=(PowerMode(device="edge", from_s=0.15, to_s=0.35, speed=0.5),))
    row = simulate(slow, [SimRequest(0.0, 100, 21)]).rows[0]
    assert row.finish_s == pytest.approx(0.1 + 0.2 + 0.1, abs=1e-9)
    stands = world(EDGE, power_mode=(PowerMode(device="edge", from_s=0.15, to_s=1.35, speed=0.0),))
    row = simulate(stands, [SimRequest(0.0, 100, 21)]).rows[0]
    assert row.finish_s == pytest.approx(0.3 + 1.2, abs=1e-9)


def test_a_slow_link_takes_its_time_and_no_more_once_it_is_over() -> None:
    slow = SlowLink(device="cloud", from_s=0.0, to_s=5.0, uplink_factor=0.1, rtt_factor=3.0)
    rows = simulate(
        world(CLOUD, slow_link=(slow,)), [SimRequest(at_s, 100, 11, prompt_bytes=10_000) for at_s in (1.0, 10.0)]
    ).rows
    assert rows[0].ttft_s == pytest.approx(0.12 + 0.1 + 0.1, abs=1e-9)
    assert rows[1].ttft_s == pytest.approx(0.04 + 0.01 + 0.1, abs=1e-9)


def test_what_a_short_cut_holds_up_comes_at_its_end() -> None:
    cut = Cut(device="cloud", from_s=1.1, to_s=2.0)
    row = simulate(world(CLOUD, cut=(cut,)), [SimRequest(1.0, 100, 51, CLOUD_ONLY)]).rows[0]
    assert (row.outcome, row.whole) == ("completed", True)
    assert 2.0 <= row.arrival_s + row.finish_s <= 2.05


def test_an_answer_that_a_long_cut_ends_goes_on_at_the_device() -> None:
    """Three probes of 3 s each find out; the device finishes what the cloud began."""
    cut = Cut(device="cloud", from_s=1.0, to_s=60.0)
    result = simulate(world(EDGE, CLOUD, cut=(cut,)), [SimRequest(0.5, 100, 300)], RouterSettings(policy="cloud-first"))
    row = result.rows[0]
    assert (row.outcome, row.tokens, row.whole) == ("completed", 300, True)
    assert (row.tier, row.reason) == ("edge", "upstream-down")
    assert 8.0 < row.finish_s < 20.0


def test_requests_use_the_cloud_again_after_a_cut() -> None:
    cut = Cut(device="cloud", from_s=5.0, to_s=30.0)
    requests = [SimRequest(float(at_s), 100, 11, Objective(deadline_s=3.0)) for at_s in range(90)]
    rows = simulate(world(EDGE, CLOUD, cut=(cut,)), requests, RouterSettings(policy="cloud-first")).rows
    served = [row.tier for row in rows]
    assert set(served[1:5]) == {"cloud"}
    assert set(served[20:29]) == {"edge"}
    assert set(served[65:]) == {"cloud"}
    assert all(row.kept for row in rows[20:])


def test_what_ran_on_a_rung_that_dies_is_finished_elsewhere() -> None:
    dead = DeadReplica(device="edge", from_s=0.2, to_s=5.0)
    requests = [SimRequest(0.0, 100, 51), SimRequest(1.0, 100, 11), SimRequest(20.0, 100, 11)]
    rows = simulate(world(EDGE, CLOUD, dead_replica=(dead,)), requests).rows
    assert [row.whole for row in rows] == [True] * 3
    assert rows[0].finish_s > 0.6 + 0.04
    assert (rows[1].tier, rows[2].tier) == ("cloud", "edge")


def test_a_dead_cloud_is_refused_until_probes_find_out() -> None:
    dead = DeadReplica(device="cloud", from_s=0.2, to_s=5.0)
    requests = [SimRequest(0.1 + at_s, 100, 11, Objective(deadline_s=4.0)) for at_s in range(40)]
    rows = simulate(world(EDGE, CLOUD, dead_replica=(dead,)), requests, RouterSettings(policy="cloud-first")).rows
    assert all(row.whole for row in rows)
    assert {row.tier for row in rows[2:5]} == {"edge"}
    assert {row.tier for row in rows[-10:]} == {"cloud"}


def test_a_dead_rung_of_a_living_cloud_leaves_the_other_one() -> None:
    small = RungSpec(variant="small", quality=0.7, prefill_tokens_per_s=1000, step_ms=5)
    both = DeviceSpec(name="cloud", slots=2, rungs=(LARGE, small), remote=True)
    dead = DeadReplica(device="cloud", variant="large", from_s=0.0, to_s=50.0)
    requests = [SimRequest(1.0 + at_s, 100, 11, CLOUD_ONLY) for at_s in range(10)]
    rows = simulate(world(both, dead_replica=(dead,)), requests).rows
    assert {row.variant for row in rows} == {"small"}


def test_an_uplink_from_a_trace_carries_what_the_trace_says(tmp_path: Path) -> None:
    (tmp_path / "up.csv").write_text("trace,t_s,mbps\na,0,8\na,1,0\na,3,16\na,4,8\nb,0,1\n", encoding="utf-8")
    (tmp_path / "packets.up").write_text("".join(f"{ms}\n" for ms in range(0, 1000, 12)), encoding="utf-8")
    toml = """
        [[device]]
        name = "cloud"
        slots = 2
        remote = true
        [device.link]
        rtt_ms = 0
        {link}
        [[device.rung]]
        variant = "large"
        quality = 1
        prefill_tokens_per_s = 1000
        step_ms = 10
        [noise]
        sigma = 0
        prior_error_sigma = 0
    """
    path = tmp_path / "world.toml"
    path.write_text(toml.format(link='trace = "up.csv"\ntrace_name = "a"'), encoding="utf-8")
    # 8 Mbit at 0.5 s: 4 Mbit to second 1, nothing to second 3, 4 Mbit in the next quarter.
    row = simulate(load_world(path), [SimRequest(0.5, 100, 1, prompt_bytes=1_000_000)]).rows[0]
    assert row.ttft_s == pytest.approx(2.75 + 0.1, abs=1e-6)
    path.write_text(toml.format(link='trace = "packets.up"'), encoding="utf-8")
    row = simulate(load_world(path), [SimRequest(0.0, 100, 1, prompt_bytes=62_500)]).rows[0]
    assert row.ttft_s == pytest.approx(0.5 + 0.1, abs=0.02)  # 1 Mbit/s


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ('trace = "none.csv"', "cannot read the network trace"),
        ('trace = "up.csv"', "holds 2 traces; set `trace_name` to one, e.g. a, b"),
        ('trace = "up.csv"\ntrace_name = "c"', "no rows of the trace 'c'"),
        ('trace = "up.csv"\ntrace_column = "up"', "no column 'up'; there are trace, t_s, mbps"),
        ('trace = "up.csv"\nuplink_mbps = 3', "set either uplink_mbps or trace"),
        ("uplink_mpbs = 3", r"world\.toml:6: unknown key `device\[0\]\.link\.uplink_mpbs`; did you mean `uplink_mbps`"),
        ("rtt_ms = -1", r"world\.toml:6: .*link\.rtt_ms"),
    ],
)
def test_a_world_that_cannot_be_is_refused_with_key_and_remedy(tmp_path: Path, link: str, message: str) -> None:
    (tmp_path / "up.csv").write_text("trace,t_s,mbps\na,0,8\nb,0,1\n", encoding="utf-8")
    path = tmp_path / "world.toml"
    path.write_text(
        f"""[[device]]
name = "cloud"
slots = 2
remote = true
[device.link]
{link}
[[device.rung]]
variant = "large"
quality = 1
prefill_tokens_per_s = 1000
step_ms = 10
""",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=message):
        simulate(load_world(path), [SimRequest(0.0, 100, 1)])


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"cut": (Cut(device="edge", from_s=1, to_s=2),)}, "is not remote"),
        ({"power_mode": (PowerMode(device="moon", from_s=1, to_s=2, speed=0.5),)}, "no device 'moon'; there are edge"),
        ({"dead_replica": (DeadReplica(device="edge", variant="x", from_s=1, to_s=2),)}, "no rung 'x'; it has large"),
        ({"dead_replica": (DeadReplica(device="edge", from_s=2, to_s=1),)}, "to_s = 1 is not after from_s = 2"),
        (
            {"cut": (Cut(device="cloud", from_s=1, to_s=5), Cut(device="cloud", from_s=4, to_s=6))},
            "two faults of one kind overlap at 4 s",
        ),
    ],
)
def test_faults_that_cannot_be_are_refused(faults: dict[str, tuple], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        world(EDGE, CLOUD, **faults)
