"""Crack 30: calibration, selection and test are three frozen sets that share nothing and come from this tree alone."""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import json
from pathlib import Path

import pytest

from models.graph.artifact import encoder_of
from models.measure import corpus
from models.measure.corpus import FOLDER, chats, chunks, digest
from models.store.store import ModelStore
from tests.support.paths import REPOSITORY

# A frozen set may only change together with every figure that was measured on it.
FROZEN = {
    "calibration.jsonl": "3222228d794c4f09",
    "selection.jsonl": "6c8270c8c559cb62",
    "selection.txt": "29b61f5b2118faa0",
    "test.jsonl": "3cdf698404a5ac3d",
    "test.txt": "a01895e8a21d2103",
}


def _questions(name: str) -> set[str]:
    rows = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["messages"][-2]["content"] for row in rows}


def _lines(name: str) -> set[str]:
    """Return the lines of a text that are long enough to be nobody else's by accident."""
    return {
        line.strip() for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines() if len(line) > 40
    }


def test_the_sets_are_frozen() -> None:
    seen = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(FOLDER.iterdir())}
    assert seen == FROZEN


def test_the_sets_share_nothing() -> None:
    for one, other in itertools.combinations(("calibration", "selection", "test"), 2):
        assert not _questions(one) & _questions(other)
    assert not _lines("selection") & _lines("test")


def test_no_text_comes_from_the_interpreter() -> None:
    tree = ast.parse(inspect.getsource(corpus))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not imported & {"importlib", "inspect", "pydoc", "sys"}


def test_nothing_is_chosen_by_the_test_set() -> None:
    """The rooms that make artifacts read calibration and selection; only verification reads the test set."""
    for path in [*(REPOSITORY / "models/int8").glob("*.py"), *(REPOSITORY / "models/prune").glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert "test" not in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}, path


def test_a_set_that_changes_is_another_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "FOLDER", tmp_path)
    (tmp_path / "selection.txt").write_text("one")
    before = digest("selection")
    (tmp_path / "selection.txt").write_text("other")
    assert digest("selection") != before


@pytest.mark.real_model
def test_the_sets_are_large_enough(models_root: Path) -> None:
    encoder = encoder_of(ModelStore(models_root), "smollm2-135m")
    assert len(chats("calibration", encoder)) >= 50
    assert len(chats("selection", encoder)) >= 25
    assert len(chats("test", encoder)) >= 25
    selection, test = chunks("selection", encoder), chunks("test", encoder)
    assert sum(map(len, selection)) >= 4_000
    assert sum(map(len, test)) >= 8_000
    assert all(chunk[0] == 1 for chunk in (*selection, *test))
