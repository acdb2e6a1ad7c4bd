"""`python -m benchmarks`: every benchmark is found by its name, and every name that is written somewhere is one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.__main__ import APART, known, main
from tests.support.paths import REPOSITORY

PAGES = [
    *(REPOSITORY / "docs").glob("*.md"),
    *(REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "Makefile")),
]


def test_modules_and_packages_are_found() -> None:
    assert {"calibration", "gateway", "tenants", "compatibility"} <= {*known()}
    assert not {name for name in known() if name.startswith("_") or name in {"live", "late_binding", "results"}}
    assert {*APART} <= {*known()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_pages_tell_to_run_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"python -m benchmarks\.\w+", text), "write `python -m benchmarks NAME`"
    named = re.findall(r"python -m benchmarks ((?:[a-z]\w* ?)+)", text)
    assert {name for names in named for name in names.split()} <= {*known()}


def test_the_page_of_benchmarks_names_them_all() -> None:
    page = (REPOSITORY / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert [name for name in known() if not re.search(rf"`{name}`|make (bench-)?{name}`", page)] == []


def test_an_unknown_name_is_told_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibraton"])
    assert "no benchmark called calibraton; there are affinity, " in capsys.readouterr().err


def test_options_go_to_one_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reconnect", "scaling", "--", "--seeds", "1"])
    assert "name it alone" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize(("options", "status"), [([], 0), (["--fails"], 1)])
def test_a_result_is_stamped_and_kept(
    options: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command runs a real benchmark, though of another folder."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/__init__.py").touch()
    (tmp_path / "benchmarks/small.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "at = sys.argv.index('--json') if '--json' in sys.argv else 0\n"
        "Path(sys.argv[at + 1]).write_text('[1, 2]') if at else print('told')\n"
        "sys.exit('--fails' in sys.argv)\n"
    )
    monkeypatch.setattr(command, "HERE", tmp_path / "benchmarks")
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "APART", {})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["--unkept", "small", "--", *options]) == status
    assert not (tmp_path / "small.json").exists()
    assert main(["small", "--", *options]) == status
    kept = json.loads((tmp_path / "small.json").read_text())
    if status == 0:
        assert kept["result"] == [1, 2]
        assert {"measured", "machine", "commit"} <= kept.keys()


def test_where_results_go_is_said_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--json", "x.json"], ["--json=x.json"]):
        with pytest.raises(SystemExit):
            main(["memory_flat", "--", *option])
        assert "leave `--json` out" in capsys.readouterr().err
