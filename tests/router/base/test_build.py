"""How the router runs: what was compiled from the very sources that stand there, for this very Python."""

from __future__ import annotations

import hashlib
import json
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from router.base.build import Build, build_of


def compiled(root: Path, *, suffix: str = EXTENSION_SUFFIXES[0]) -> Path:
    """Leave what `setup.py` leaves beside one compiled module; return its source."""
    source = root / "router/policy/worth.py"
    source.parent.mkdir(parents=True)
    source.write_text("RANK = 1\n")
    manifest = {"suffix": suffix, "sources": {"router/policy/worth.py": hashlib.sha256(b"RANK = 1\n").hexdigest()}}
    (root / "router/base").mkdir()
    (root / "router/base/compiled.json").write_text(json.dumps(manifest))
    return source


def test_sources_alone_are_interpreted(tmp_path: Path) -> None:
    assert build_of(tmp_path) == Build(compiled=False)
    assert build_of(tmp_path).name == "interpreted"


def test_what_was_compiled_from_them_runs(tmp_path: Path) -> None:
    compiled(tmp_path)
    assert build_of(tmp_path).name == "compiled"


def test_what_was_compiled_for_another_python_does_not(tmp_path: Path) -> None:
    compiled(tmp_path, suffix=".cpython-39-sparc-linux-gnu.so")
    assert build_of(tmp_path).name == "interpreted"


@pytest.mark.parametrize("change", [lambda path: path.write_text("RANK = 2\n"), Path.unlink], ids=["edited", "gone"])
def test_another_source_shows(tmp_path: Path, change) -> None:
    change(compiled(tmp_path))
    assert build_of(tmp_path) == Build(compiled=True, changed=("router/policy/worth.py",))
    assert build_of(tmp_path).name == "outdated"
