"""A batch beside online traffic, and a tier that is killed; a small run of `benchmarks/batches.py` on the stub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import batches


@pytest.mark.process
def test_each_line_is_answered_once_by_a_tier_that_is_killed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told.json"
    arguments = ["batches", "--engine", "stub", "--lines", "240", "--turns", "1", "--turn-s", "3", "--json", str(told)]
    monkeypatch.setattr("sys.argv", arguments)
    batches.main()
    result = json.loads(told.read_text())
    (kill,) = result["killed"]
    assert (kill["lines"], kill["answered_once"], kill["answered_more_than_once"], kill["missing"]) == (240, 240, 0, 0)
    assert kill["wrong"] == 0
    assert kill["computed"] >= 240
    assert [row["batch"] for row in result["online"]] == [False, True]
    assert result["online"][0]["requests"] == result["online"][1]["requests"] > 0
