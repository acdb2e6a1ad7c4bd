"""Crack 15: a full disk ends in one `ArtifactError` that names folder, bytes and remedy; nothing half is left."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from models.catalogue.families import Catalogue, Family, Source, Variant
from models.graph.export import export
from models.int8 import quantize as quantize_module
from models.int8.quantize import Quantizer, quantize
from models.measure.corpus import chats
from models.store import disk
from models.store.store import ModelStore
from models.tensorrt import build as build_module
from models.tensorrt.build import BuildOptions, build
from router.base.errors import ArtifactError
from tests.support.model_store import tiny_store
from tests.support.paths import REPOSITORY
from tests.support.tiny_tokenizer import backend

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VARIANTS = """
[[variants]]
name = "toy-fp32"
rung = 0
quality = 1.0
quality_measured = "-"
precision = "fp32"
format = "weights"

[[variants]]
name = "toy-int8"
rung = 1
quality = 0.9
quality_measured = "-"
precision = "int8"
format = "onnx"
derived_from = "toy-fp32"
"""
MEASURED: dict[str, Any] = {"quality": 1.0, "quality_measured": "-"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, few chats, and no judgement of what a random model says."""
    torch.set_num_threads(1)
    monkeypatch.setattr(quantize_module, "chats", lambda name, encoder: chats(name, encoder)[:2])
    monkeypatch.setattr(Quantizer, "lost_in_speech", lambda *_: [])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a tiny random llama with tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("toy")
    made = backend()
    config = transformers.LlamaConfig(
        vocab_size=made.get_vocab_size(with_added_tokens=True),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


def toy_store(root: Path, source: Path) -> ModelStore:
    fp32 = Variant(name="toy-fp32", rung=0, precision="fp32", format="weights", **MEASURED)
    int8 = Variant(name="toy-int8", rung=1, precision="int8", format="onnx", derived_from="toy-fp32", **MEASURED)
    family = Family(
        name="toy",
        title="Toy",
        parameters=1,
        context_tokens=2048,
        licence="-",
        sources=(Source(uri=f"dir:{source}"),),
        variants=(fp32, int8),
    )
    return ModelStore(root, Catalogue([family]))


class SmallDisk:
    """A real file system in memory of `size_bytes`; `leave` fills it up to so many free bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def leave(self, free_bytes: int) -> None:
        filler = self.root / "filler"
        filler.unlink(missing_ok=True)
        with filler.open("wb") as file:
            file.truncate(0)
            os.posix_fallocate(file.fileno(), 0, max(1, self.free_bytes - free_bytes))

    @property
    def free_bytes(self) -> int:
        seen = os.statvfs(self.root)
        return seen.f_bavail * seen.f_frsize


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system of 8 MiB; skipped where this user may not mount one."""
    root = tmp_path / "small"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(root)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        yield SmallDisk(root)
    finally:
        subprocess.run(["umount", str(root)], check=True)


def left_over(root: Path) -> list[str]:
    """Everything in a store but locks and what was whole before."""
    return sorted(
        path.name
        for path in root.rglob("*")
        if path.is_file() and not path.name.endswith(".lock") and path.name != "filler"
    )


def told(error: ArtifactError, root: Path) -> None:
    assert str(root) in error.message
    assert "OVERSPILL_MODELS" in error.message
    assert "are free" in error.message


@pytest.mark.process
@pytest.mark.parametrize("free_bytes", [0, 8 << 10, 64 << 10, 330 << 10])
@pytest.mark.parametrize("make", [export, quantize])
def test_a_disk_that_fills_up_while_an_artifact_is_written(
    make: object, free_bytes: int, small_disk: SmallDisk, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else takes the space after it was looked at: whichever write fails, error and folder are the same."""
    monkeypatch.setattr(disk, "need_space", lambda *_: None)
    store = toy_store(small_disk.root / "store", source)
    name = "toy-fp32" if make is export else "toy-int8"
    small_disk.leave(free_bytes)
    with pytest.raises(ArtifactError) as caught:
        make(name, store)  # type: ignore[operator]
    told(caught.value, small_disk.root)
    assert left_over(small_disk.root) == []
    (small_disk.root / "filler").unlink()
    assert make(name, store).is_dir()  # type: ignore[operator]


@pytest.mark.process
@pytest.mark.parametrize("make", [export, quantize])
def test_too_little_space_is_said_before_the_work_begins(make: object, small_disk: SmallDisk, source: Path) -> None:
    small_disk.leave(200 << 10)
    notes: list[str] = []
    name = "toy-fp32" if make is export else "toy-int8"
    with pytest.raises(ArtifactError, match="bytes are needed") as caught:
        make(name, toy_store(small_disk.root / "store", source), note=notes.append)  # type: ignore[operator]
    told(caught.value, small_disk.root)
    assert not [line for line in notes if "writing" in line or "rotating" in line]
    assert left_over(small_disk.root) == []


@pytest.mark.process
def test_what_was_there_stays_when_its_successor_does_not_fit(
    small_disk: SmallDisk, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = toy_store(small_disk.root / "store", source)
    quantize("toy-int8", store)
    monkeypatch.setattr(disk, "need_space", lambda *_: None)
    small_disk.leave(100 << 10)
    with pytest.raises(ArtifactError):
        quantize("toy-int8", store, force=True)
    store.check_artifact("toy-int8")


@pytest.mark.process
@pytest.mark.parametrize("free_bytes", [0, 4 << 10])
def test_an_engine_that_does_not_fit(free_bytes: int, small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is megabytes that only exist once they are built."""
    store = tiny_store(small_disk.root / "store")
    monkeypatch.setattr(disk, "need_space", lambda *_: None)
    monkeypatch.setattr(build_module, "_module", lambda _: FakeTensorRt)
    monkeypatch.setattr(build_module, "_target", lambda *_: "sm86")
    monkeypatch.setattr(build_module, "_build_plan", lambda *_: (b"plan" * 100_000, "network"))
    before = left_over(small_disk.root)
    small_disk.leave(free_bytes)
    with pytest.raises(ArtifactError) as caught:
        build("tiny-int8", store, runtime="tensorrt_rtx", target="sm86", options=BuildOptions())
    told(caught.value, small_disk.root)
    assert left_over(small_disk.root) == before
    (small_disk.root / "filler").unlink()
    assert build("tiny-int8", store, runtime="tensorrt_rtx", target="sm86", options=BuildOptions()).plan.is_file()


class FakeTensorRt:
    """Stands in for the library: what is tested is the disk."""

    __version__ = "10.3.0"


@pytest.mark.process
@pytest.mark.parametrize("arguments", [("export", "toy-fp32"), ("pull", "toy", "--prepare")])
def test_the_command_prints_one_error_and_exits_with_2(
    arguments: tuple[str, ...], small_disk: SmallDisk, source: Path, tmp_path: Path
) -> None:
    head = 'name = "toy"\ntitle = "Toy"\nparameters = 1\ncontext_tokens = 2048\nlicence = "-"\n'
    (tmp_path / "catalogue").mkdir()
    (tmp_path / "catalogue" / "toy.toml").write_text(f'{head}[[sources]]\nuri = "dir:{source}"\n{VARIANTS}')
    small_disk.leave(4 << 10)
    environment = {
        **os.environ,
        "OVERSPILL_MODELS": str(small_disk.root / "store"),
        "OVERSPILL_CATALOGUE": str(tmp_path / "catalogue"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "overspill", "models", *arguments],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert str(small_disk.root) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert left_over(small_disk.root) == []


def test_where_nothing_can_be_mounted_the_write_itself_fails(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same at the system's boundary, for users who may not mount: the third write finds the disk full."""
    real, writes = Path.write_bytes, []

    def full(path: Path, data: bytes) -> int:
        writes.append(path.name)
        if path.name == "model.onnx":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ArtifactError) as caught:
        export("toy-fp32", toy_store(tmp_path / "store", source))
    told(caught.value, tmp_path / "store")
    assert "model.onnx" in writes
    assert left_over(tmp_path) == []
