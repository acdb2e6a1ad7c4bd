"""A run that measured a part leaves the other results, each with the day, commit and machine of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as command
from benchmarks.__main__ import main
from benchmarks._kept import ROWS, merged
from tests.support.paths import REPOSITORY

OLD = {"measured": "2026-11-20", "machine": {"cpu": "a"}, "commit": "old"}
NEW = {"measured": "2026-11-22", "machine": {"cpu": "a"}, "commit": "new"}


def of(engine: str, batch: bool, value: int) -> dict[str, Any]:
    return {"engine": engine, "batch": batch, "value": value}


def test_rows_that_were_not_measured_keep_their_stamp() -> None:
    before = {
        **OLD,
        "result": {"online": [of("stub", True, 1), of("real", True, 2)], "p95_ratio": {"stub": 1, "real": 2}},
    }
    now = {**NEW, "result": {"online": [of("real", True, 3), of("real", False, 4)], "p95_ratio": {"real": 3}}}
    once = merged("batches", before, now)
    assert once == {
        **NEW,
        "result": {
            "online": [{**of("stub", True, 1), "stamp": OLD}, of("real", True, 3), of("real", False, 4)],
            "p95_ratio": {"stub": 1, "real": 3},
        },
    }
    later = {**NEW, "measured": "2026-11-23", "result": {"online": [of("real", True, 5)], "p95_ratio": {"real": 5}}}
    twice = merged("batches", once, later)["result"]["online"]
    assert [row.get("stamp", {}).get("measured") for row in twice] == ["2026-11-20", None, "2026-11-22"]


def test_parts_that_were_not_measured_keep_their_stamp() -> None:
    before = {**OLD, "result": {"answers": {"schemas": 9}, "cost": {"cloud": {"schema": 1}}}}
    now = {**NEW, "result": {"answers": {"schemas": 1000}}}
    assert merged("structured", before, now)["result"] == {
        "answers": {"schemas": 1000},
        "cost": {"cloud": {"schema": 1}, "stamp": OLD},
    }


def test_a_result_that_stamps_itself_is_merged_alike() -> None:
    before = {**OLD, "shares": [{"mix": "a"}], "storm": [{"clients": 1}]}
    found = merged("tenants", before, {**NEW, "shares": [{"mix": "b"}]})
    assert found == {**NEW, "shares": [{"mix": "b"}], "storm": [{"clients": 1, "stamp": OLD}]}


@pytest.mark.parametrize("before", [[1, 2], {**OLD, "result": [1]}, {**OLD, "result": 3}])
def test_what_has_no_parts_is_replaced(before: Any) -> None:
    now = {**NEW, "result": {"answers": {}}}
    assert merged("structured", before, now) == now
    assert merged("gateway", {**OLD, "rows": [{"server": "nginx"}]}, {**NEW, "rows": []}) == {**NEW, "rows": []}


_ROWS = st.lists(
    st.builds(of, st.sampled_from("abc"), st.booleans(), st.integers()), unique_by=lambda r: (r["engine"], r["batch"])
)


@given(_ROWS, _ROWS)
def test_every_row_is_there_once_and_the_newest_of_it(was: list[Any], new: list[Any]) -> None:
    found = merged("batches", {**OLD, "result": {"online": was}}, {**NEW, "result": {"online": new}})["result"][
        "online"
    ]
    keys = [(row["engine"], row["batch"]) for row in found]
    assert sorted(keys) == sorted({(row["engine"], row["batch"]) for row in [*was, *new]})
    assert all(row in found for row in new)
    assert all(row["stamp"] == OLD for row in found if row not in new)


def test_the_rows_of_kept_results_have_the_keys() -> None:
    for name, parts in ROWS.items():
        kept = json.loads((REPOSITORY / f"benchmarks/results/{name}.json").read_text())
        result = kept.get("result", kept)
        for part, keys in parts.items():
            rows = result[part] if keys else []
            assert len({tuple(row[key] for key in keys) for row in rows}) == len(rows), (name, part)


@pytest.mark.process
def test_the_command_merges_where_options_chose_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/__init__.py").touch()
    (tmp_path / "benchmarks/structured.py").write_text(
        "import json, sys\nfrom pathlib import Path\n"
        "to = Path(sys.argv[sys.argv.index('--json') + 1])\n"
        "parts = [sys.argv[-1]] if '--only' in sys.argv else ['answers', 'cost']\n"
        "to.write_text(json.dumps({part: {'run': len(sys.argv)} for part in parts}))\n"
        "sys.exit('cost' in sys.argv)\n"
    )
    for name, value in {"HERE": tmp_path / "benchmarks", "RESULTS": tmp_path, "APART": {}}.items():
        monkeypatch.setattr(command, name, value)
    monkeypatch.setattr(command, "commit", lambda: "one")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["structured"]) == 0
    monkeypatch.setattr(command, "commit", lambda: "two")
    assert main(["structured", "--", "--only", "cost"]) == 1, "it says that it failed, and its figures are kept"
    kept = json.loads((tmp_path / "structured.json").read_text())
    assert (kept["commit"], kept["result"]["cost"]) == ("two", {"run": 5})
    assert (kept["result"]["answers"]["run"], kept["result"]["answers"]["stamp"]["commit"]) == (3, "one")
    assert main(["structured"]) == 0
    assert json.loads((tmp_path / "structured.json").read_text())["result"] == {
        "answers": {"run": 3},
        "cost": {"run": 3},
    }
