"""The command as a whole: its version, its completion through parts that load when called, its verbs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import typer.main

from overspill import PARTS
from router.base.build import build_of
from tests.support.paths import REPOSITORY

# As the script that pip installs: completion is set up for the name that it was called by.
SCRIPT = "import sys; sys.argv[0] = 'overspill'; from overspill import main; main()"


def overspill(*arguments: str, home: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables, **({} if home is None else {"HOME": str(home)})}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def completed(line: str) -> list[str]:
    """Return what a Bash that has the completion installed offers at the end of a line."""
    words = line.split(" ")
    variables: dict[str, Any] = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_OVERSPILL_COMPLETE": "complete_bash",
    }
    return overspill(**variables).stdout.split()


@pytest.mark.process
def test_the_version_is_told() -> None:
    done = overspill("--version")
    assert done.stdout.strip() == f"overspill {metadata.version('overspill')} (router {build_of().name})"


@pytest.mark.process
def test_a_mistyped_part_is_told_the_nearest() -> None:
    done = overspill("edg", TERM="dumb")
    assert done.returncode == 2
    assert "Did you mean 'edge'?" in done.stderr


@pytest.mark.process
def test_completion_can_be_installed(tmp_path: Path) -> None:
    done = overspill("--install-completion", "bash", home=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0, done.stderr
    assert "_OVERSPILL_COMPLETE" in (tmp_path / ".bash_completions" / "overspill.sh").read_text()


@pytest.mark.process
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("overspill ", {*PARTS}),
        ("overspill models ", {"pull", "list", "show", "export", "quantize", "verify", "prune", "build"}),
        ("overspill models qu", {"quantize"}),
        ("overspill models verify smollm2-135m-int", {"smollm2-135m-int8"}),
        ("overspill models pull smo", {"smollm2-135m"}),
        ("overspill fleet ge", {"get"}),
        ("overspill edge check --js", {"--json"}),
        ("overspill explain --f", {"--file"}),
    ],
)
def test_completion_reaches_into_the_parts(line: str, offered: set[str]) -> None:
    assert set(completed(line)) == offered


def test_whatever_prints_a_table_prints_json_too() -> None:
    reading = {"edge": ("profile", "check"), "cloud": ("check",), "models": ("list", "show", "verify")}
    for part, commands in reading.items():
        group: Any = typer.main.get_command(import_module(PARTS[part][0]).app)
        for command in commands:
            assert "--json" in {option for item in group.commands[command].params for option in item.opts}, command


def test_either_tier_is_started_by_either_verb() -> None:
    """`edge run` and `cloud serve` are what the papers write; whoever mixes them up is understood."""
    for part in ("edge", "cloud"):
        group: Any = typer.main.get_command(import_module(PARTS[part][0]).app)
        assert {"run", "serve"} <= group.commands.keys()
        assert group.commands["run"].hidden != group.commands["serve"].hidden
        one, other = ([item.opts for item in group.commands[verb].params] for verb in ("run", "serve"))
        assert one == other
