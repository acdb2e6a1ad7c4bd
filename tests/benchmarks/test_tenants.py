"""The benchmark of tenants in small: what it looks for is found where it is, and not where it is not."""

from __future__ import annotations

import pytest

from benchmarks.tenants import fuzz, shares, storm
from benchmarks.tenants.house import Setting
from router.tenants.tenant import Caller


def test_random_requests_crash_nothing_and_tell_nobody_of_another() -> None:
    found = fuzz.run(600, seed=7)
    assert found["faults"] == []
    assert found["answers"] > 0


def test_a_leak_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Caller, "may_use", lambda *_: True)
    assert any("told of the model" in str(fault) for fault in fuzz.run(400, seed=7)["faults"])  # type: ignore[attr-defined]


def test_a_neighbour_keeps_its_part_beside_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "WARM_UP_S", 30.0)
    monkeypatch.setattr(shares, "LASTS_S", 60.0)
    alone, fair = (shares.run("equal", Setting(callers=callers), 1)["got_of_fair"] for callers in (0.0, 1000.0))
    assert isinstance(alone, float)
    assert isinstance(fair, float)
    assert alone < 0.5
    assert fair >= 0.9


def test_the_storm_speaks_through_the_real_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm, "WARM_UP_S", 5.0)
    monkeypatch.setattr(storm, "LASTS_S", 10.0)
    seen = storm.run(60, Setting(slots=2), 1, outage=False)
    assert isinstance(seen["goodput_per_s"], float)
    assert seen["goodput_per_s"] > 0
