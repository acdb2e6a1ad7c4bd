"""Private copies: verified, shared by content, made anew when damaged, visibly given up where there is no room."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edge_agent.runtime.manifest import read_manifest
from edge_agent.runtime.private_copy import PrivateCopies
from router.base.errors import ArtifactError
from tests.support.tiny_llama import Sizes, write_artifact


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "store" / "tiny-int8", Sizes(), prefix=(1,))


def test_a_copy_outlives_what_happens_to_the_store(artifact: Path, tmp_path: Path) -> None:
    copies, manifest = PrivateCopies(tmp_path / "cache"), read_manifest(artifact)
    assert not copies.holds(manifest)
    held = copies.hold(artifact, manifest)
    assert held.problem == ""
    assert held.folder.is_relative_to(tmp_path / "cache")
    assert copies.holds(manifest)
    (artifact / "model.onnx").write_bytes(b"overwritten in place")
    assert copies.hold(artifact, manifest) == held
    with pytest.raises(ArtifactError, match=r"model\.onnx"):  # a new process believes the store, and refuses it
        PrivateCopies(tmp_path / "cache").hold(artifact, manifest)


def test_a_copy_is_found_again_by_a_new_process_and_made_anew_when_damaged(artifact: Path, tmp_path: Path) -> None:
    manifest = read_manifest(artifact)
    folder = PrivateCopies(tmp_path / "cache").hold(artifact, manifest).folder
    written_ns = (folder / "model.onnx").stat().st_mtime_ns
    assert PrivateCopies(tmp_path / "cache").hold(artifact, manifest).folder == folder
    assert (folder / "model.onnx").stat().st_mtime_ns == written_ns
    (folder / "model.onnx").chmod(0o600)
    (folder / "model.onnx").write_bytes(b"damaged")
    assert PrivateCopies(tmp_path / "cache").hold(artifact, manifest).folder == folder
    assert (folder / "model.onnx").read_bytes() == (artifact / "model.onnx").read_bytes()


def test_copies_of_older_builds_are_removed(artifact: Path, tmp_path: Path) -> None:
    copies = PrivateCopies(tmp_path / "cache")
    old = copies.hold(artifact, read_manifest(artifact)).folder
    shutil.rmtree(artifact)
    write_artifact(artifact, Sizes(seed=99), prefix=(1,))
    new = copies.hold(artifact, read_manifest(artifact)).folder
    assert new != old
    assert [path.name for path in (tmp_path / "cache" / "tiny-int8").iterdir()] == [new.name]


def test_where_no_copy_can_be_made_the_store_is_used_and_it_is_said(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    held = PrivateCopies(tmp_path / "cache").hold(artifact, read_manifest(artifact))
    assert held.folder == artifact
    assert "must not be written to" in held.problem
