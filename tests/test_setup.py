"""What compiles the router asks for what it needs: mypyc reads what a module imports, in an environment of its own."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"router", "__future__"}

setuptools = pytest.importorskip("setuptools")


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of setup.py, with nothing built."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.delenv("OVERSPILL_COMPILE", raising=False)
    return runpy.run_path(str(REPOSITORY / "setup.py"))


def imported(path: Path) -> set[str]:
    """Return the packages of others that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return {name.partition(".")[0] for name in found} - PACKAGES - set(sys.stdlib_module_names)


def test_what_is_compiled_is_there_once(recipe: dict[str, Any]) -> None:
    sources = recipe["SOURCES"]
    assert [path for path in sources if not (REPOSITORY / path).is_file()] == []
    assert len(set(sources)) == len(sources)


def test_what_compiled_modules_import_is_asked_for(recipe: dict[str, Any]) -> None:
    asked = {re.split(r"[<>=!]", line)[0].replace("-", "_") for line in recipe["NEEDED"]}
    missing = {path: imported(REPOSITORY / path) - asked for path in recipe["SOURCES"]}
    assert {path: names for path, names in missing.items() if names} == {}
    assert imported(REPOSITORY / "router/gateway/connection.py") > {"uvicorn", "httptools"}, "it looks"
