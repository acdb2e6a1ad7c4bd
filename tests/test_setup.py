"""What compiles the router asks for what it needs: mypyc reads what a module imports, in an environment of its own."""

from __future__ import annotations

import ast
import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"router", "__future__"}


@pytest.fixture
def recipe() -> dict[str, Any]:
    """Lists of setup.py, as they are written there: to run it would import what replaces `distutils` for all tests."""
    found = {}
    for node in ast.parse((REPOSITORY / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):  # what is computed
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


@pytest.fixture
def sources(recipe: dict[str, Any]) -> list[str]:
    return [f"{room}/{module}.py" for room, modules in recipe["MODULES"].items() for module in modules.split()]


def imported(path: Path) -> set[str]:
    """Return the packages of others that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return {name.partition(".")[0] for name in found} - PACKAGES - set(sys.stdlib_module_names)


def test_what_is_compiled_is_there_once(sources: list[str]) -> None:
    assert [path for path in sources if not (REPOSITORY / path).is_file()] == []
    assert len(set(sources)) == len(sources)


def test_what_compiled_modules_import_is_asked_for(recipe: dict[str, Any], sources: list[str]) -> None:
    asked = {re.split(r"[<>=!]", line)[0].replace("-", "_") for line in recipe["NEEDED"]}
    missing = {path: imported(REPOSITORY / path) - asked for path in sources}
    assert {path: names for path, names in missing.items() if names} == {}
    assert imported(REPOSITORY / "router/gateway/connection.py") > {"uvicorn", "httptools"}, "it looks"


@pytest.mark.process
def test_a_profiled_build_has_what_its_simulations_import(recipe: dict[str, Any]) -> None:
    lines = recipe["NEEDED"] + recipe["REHEARSED"]
    asked = sorted(re.split(r"[<>=!]", line)[0].replace("-", "_") for line in lines)
    done = subprocess.run(
        [sys.executable, "-c", REHEARSAL, "router", *asked], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000


REHEARSAL = """
import sys

class Asked:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.argv[1:], *sys.stdlib_module_names}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Asked)
from router.simulation.rehearsal import rehearse
print(rehearse(10, 10))
"""


@pytest.mark.process
def test_what_an_earlier_release_left_is_not_installed(tmp_path: Path) -> None:
    """It would be: a build in the checkout takes along modules and profiles that this release has no more."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "overspill.py"):
        shutil.copy(REPOSITORY / name, tmp_path)
    for name in ("router", "edge_agent", "cloud_tier", "models", "hardware_profiles"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    left = [tmp_path / "build/lib" / name for name in ("router/gone.py", "hardware_profiles/old-board.toml")]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "build/lib/router/base/build.py").is_file()
    assert [path for path in left if path.exists()] == []
