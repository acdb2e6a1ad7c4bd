"""The ONNX runtime on a tiny random llama: chunks, batches and moved rows give the logits of the plain run."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from edge_agent.runtime.onnx.runtime import open_onnx
from edge_agent.runtime.protocol import Runtime, RuntimeRequest, StepInput
from edge_agent.runtime.registry import open_runtime
from hardware_profiles.loader import RuntimeOptions
from router.base.errors import ArtifactError, ConfigError
from tests.support.tiny_llama import Sizes, run_plain, write_artifact

SIZES = Sizes()
CPU = RuntimeOptions(intra_op_threads=1)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("tiny") / "tiny-int8", SIZES, prefix=(1,))


@pytest.fixture
def runtime(artifact: Path) -> Iterator[Runtime]:
    loaded = open_onnx(RuntimeRequest(artifact, CPU, slots=4, context_tokens=256, chunk_tokens=128))
    yield loaded
    loaded.close()


def ids_of(seed: int, count: int) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, SIZES.vocab, size=count - 1).tolist()]


def plain(artifact: Path, ids: list[int], past: dict[str, np.ndarray] | None = None) -> np.ndarray:
    return run_plain(artifact / "model.onnx", SIZES, ids, past)["logits"][0]


def mixed_past(artifact: Path, own: int, settled: int, settled_layer: int) -> dict[str, np.ndarray]:
    """Keys and values of the token `own` below a layer and of `settled` from there on, as the past of a next step."""
    one, other = (run_plain(artifact / "model.onnx", SIZES, [token]) for token in (own, settled))
    return {
        f"past_{kind}.{layer}": (one if layer < settled_layer else other)[f"new_{kind}.{layer}"]
        for layer in range(SIZES.layers)
        for kind in "kv"
    }


@pytest.mark.parametrize("chunks", [(59,), (16, 16, 16, 11), (1,) * 59, (58, 1), (1, 58)])
def test_prefill_in_chunks_equals_one_go(runtime: Runtime, artifact: Path, chunks: tuple[int, ...]) -> None:
    ids = ids_of(3, 60)
    expected = plain(artifact, ids)
    sequence, cached = runtime.open(ids)
    assert cached == 1  # the prefix
    position = cached
    for count in chunks:
        last = position + count == len(ids)
        logits = runtime.forward([StepInput(sequence, ids[position : position + count], want_logits=last)])
        position += count
        assert logits.shape == (1 if last else 0, SIZES.vocab)
    np.testing.assert_allclose(logits[0], expected[-1], atol=1e-4)


def test_a_batch_of_unequal_lengths_equals_each_alone(runtime: Runtime, artifact: Path) -> None:
    """Sequences join and leave, so that rows move and the pack grows and shrinks under them."""
    rng = np.random.default_rng(11)
    prompts = {name: ids_of(name, int(rng.integers(2, 120))) for name in range(10)}
    expected = {name: plain(artifact, ids_of(name, len(ids) + 100)) for name, ids in prompts.items()}
    full = {name: ids_of(name, len(ids) + 100) for name, ids in prompts.items()}
    waiting, open_rows, fed = list(prompts), {}, {}
    left = {name: int(rng.integers(5, 90)) for name in prompts}
    while waiting or open_rows:
        if waiting and len(open_rows) < 4 and rng.random() < 0.4:
            name = waiting.pop()
            open_rows[name], fed[name] = runtime.open(prompts[name])
            chunk = full[name][fed[name] : len(prompts[name])]
            logits = runtime.forward([StepInput(open_rows[name], chunk)])
            fed[name] += len(chunk)
            np.testing.assert_allclose(logits[0], expected[name][fed[name] - 1], atol=2e-4)
        batch = [name for name in open_rows if rng.random() < 0.8]
        if not batch:
            continue
        logits = runtime.forward([StepInput(open_rows[name], [full[name][fed[name]]]) for name in batch])
        for row, name in zip(logits, batch, strict=True):
            fed[name] += 1
            left[name] -= 1
            np.testing.assert_allclose(row, expected[name][fed[name] - 1], atol=2e-4)
            if left[name] == 0:
                runtime.close_sequence(open_rows.pop(name))


def test_a_prompt_without_the_prefix_or_no_longer_than_it_starts_empty(runtime: Runtime, artifact: Path) -> None:
    for ids in ([5, 6, 7], [1]):
        sequence, cached = runtime.open(ids)
        assert cached == 0
        logits = runtime.forward([StepInput(sequence, ids)])
        np.testing.assert_allclose(logits[0], plain(artifact, ids)[-1], atol=1e-4)
        runtime.close_sequence(sequence)


def test_the_logits_behind_every_token_of_a_prompt(tmp_path: Path) -> None:
    ids = ids_of(5, 40)
    artifact = write_artifact(tmp_path / "tiny-int8", SIZES, prefix=(1,), settled_layer=1)
    runtime = open_onnx(RuntimeRequest(artifact, CPU, slots=4, context_tokens=256, chunk_tokens=128))
    try:
        sequence, cached = runtime.open(ids, from_scratch=True)
        assert cached == 0
        rows = [runtime.forward([StepInput(sequence, ids[:1], every=True)]).copy()]
        rows += [
            runtime.forward([StepInput(sequence, ids[at : at + 13], every=True)]).copy() for at in range(1, 40, 13)
        ]
        np.testing.assert_allclose(np.concatenate(rows), plain(artifact, ids), atol=1e-4)
    finally:
        runtime.close()


def test_another_first_token_takes_the_settled_layers_from_the_artifact(tmp_path: Path) -> None:
    """Layer 0 is its own; from layer 1 on it has the keys and values of token 1, and the logits behind it."""
    artifact = write_artifact(tmp_path / "tiny-int8", SIZES, prefix=(1,), settled_layer=1)
    mixed = mixed_past(artifact, 5, 1, settled_layer=1)
    runtime = open_onnx(RuntimeRequest(artifact, CPU, slots=4, context_tokens=256, chunk_tokens=128))
    try:
        sequence, cached = runtime.open([5, 6, 7])
        assert cached == 1
        logits = runtime.forward([StepInput(sequence, [6, 7])])
        np.testing.assert_allclose(logits[0], plain(artifact, [6, 7], mixed)[-1], atol=1e-4)
        runtime.close_sequence(sequence)
        for alone in (5, 1):
            sequence, cached = runtime.open([alone])
            assert cached == 0
            logits = runtime.forward([StepInput(sequence, [alone])])
            np.testing.assert_allclose(logits[0], plain(artifact, [1])[-1], atol=1e-4)
            logits = runtime.forward([StepInput(sequence, [9])])
            past = mixed if alone == 5 else mixed_past(artifact, 1, 1, settled_layer=1)
            np.testing.assert_allclose(logits[0], plain(artifact, [9], past)[-1], atol=1e-4)
            runtime.close_sequence(sequence)
    finally:
        runtime.close()


def test_the_window_can_be_filled_to_its_last_token(artifact: Path) -> None:
    runtime = open_onnx(RuntimeRequest(artifact, CPU, slots=1, context_tokens=100, chunk_tokens=128))
    ids = ids_of(5, 100)
    sequence, cached = runtime.open(ids)
    runtime.forward([StepInput(sequence, ids[cached:99])])
    logits = runtime.forward([StepInput(sequence, ids[99:])])
    np.testing.assert_allclose(logits[0], plain(artifact, ids)[-1], atol=1e-4)
    runtime.close()


def test_slots_are_counted_and_unknown_sequences_refused(runtime: Runtime) -> None:
    sequences = [runtime.open([5])[0] for _ in range(4)]
    with pytest.raises(RuntimeError, match="KV slots"):
        runtime.open([5])
    runtime.close_sequence(sequences[0])
    with pytest.raises(RuntimeError, match="not open"):
        runtime.forward([StepInput(sequences[0], [5])])
    with pytest.raises(ValueError, match="same number of ids"):
        runtime.forward([StepInput(sequences[1], [5]), StepInput(sequences[2], [5, 6])])


def test_facts_name_what_is_loaded(runtime: Runtime) -> None:
    facts = runtime.facts
    assert (facts.variant, facts.vocab_size, facts.slots, facts.context_tokens) == ("tiny-int8", 61, 4, 256)
    assert facts.providers == ("CPUExecutionProvider",)
    assert facts.fallbacks == ()


def test_a_missing_accelerator_is_a_visible_fallback(artifact: Path) -> None:
    options = RuntimeOptions(providers=("tensorrt", "cuda", "cpu"), intra_op_threads=1)
    runtime = open_runtime(RuntimeRequest(artifact, options, slots=1, context_tokens=64, chunk_tokens=128))
    assert runtime.facts.providers == ("CPUExecutionProvider",)
    assert [line.split(":")[0] for line in runtime.facts.fallbacks] == ["tensorrt", "cuda"]
    runtime.close()


@pytest.mark.parametrize("there", [True, False], ids=["tensorrt", "no-tensorrt"])
def test_no_engine_is_ever_built_in_the_agents_process(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """ONNX Runtime's TensorRT provider builds inside the first run, for minutes: it must never get hold of a model."""
    asked: list[object] = []
    session = ort.InferenceSession

    def opened(model: str, options: object, providers: list[tuple[str, dict[str, str]]]) -> ort.InferenceSession:
        asked.extend(name for name, _ in providers)
        return session(model, options, providers=["CPUExecutionProvider"])

    every = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: every)
    monkeypatch.setattr(ort, "InferenceSession", opened)
    module = types.ModuleType("tensorrt")
    vars(module)["__version__"] = "10.3"
    monkeypatch.setitem(sys.modules, "tensorrt", module if there else None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    options = RuntimeOptions(providers=("tensorrt", "cuda", "cpu"), intra_op_threads=1)
    runtime = open_runtime(RuntimeRequest(artifact, options, slots=1, context_tokens=64, chunk_tokens=128))
    assert asked == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert ("overspill models build tiny-int8" in runtime.facts.fallbacks[0]) is there
    runtime.close()


def test_a_rung_that_must_run_on_tensorrt_says_which_build_it_needs(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("tensorrt")
    vars(module)["__version__"] = "10.3"
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    request = RuntimeRequest(artifact, RuntimeOptions(name="tensorrt"), 2, context_tokens=64, chunk_tokens=16)
    with pytest.raises(ArtifactError, match="overspill models build tiny-int8 --runtime tensorrt --batch 2 --chunk 16"):
        open_runtime(request)


def _flip(directory: Path) -> None:
    raw = bytearray((directory / "model.onnx").read_bytes())
    raw[len(raw) // 2] ^= 1
    (directory / "model.onnx").write_bytes(raw)


def _manifest(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": _flip,
    "short": lambda directory: (directory / "model.onnx").write_bytes(b""),
    "gone": lambda directory: (directory / "prefix.npz").unlink(),
    "foreign": _manifest(format="something-else"),
    "layers": _manifest(num_layers=3),
    "outside": _manifest(
        files={"model.onnx": {"sha256": "0" * 64, "bytes": 1}, "../x": {"sha256": "0" * 64, "bytes": 1}}
    ),
    "unlisted": _manifest(files={}),
    "no-json": lambda directory: (directory / "manifest.json").write_text("{"),
    "no-text": lambda directory: (directory / "manifest.json").write_bytes(b'{"variant": "\xff"}'),
    "no-end": lambda directory: (directory / "manifest.json").write_bytes(b"[" * 100_000),
    "no-manifest": lambda directory: (directory / "manifest.json").unlink(),
}


def copied(artifact: Path, target: Path) -> Path:
    return shutil.copytree(artifact, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("flipped", "model.onnx is damaged"),
        ("short", "model.onnx has 0 bytes"),
        ("gone", "prefix.npz"),
        ("foreign", "format `something-else`"),
        ("layers", "prefix.npz"),
        ("outside", "outside its directory"),
        ("unlisted", "lists no model.onnx"),
        ("no-json", "not a valid manifest"),
        ("no-text", "not a valid manifest"),
        ("no-end", "not a valid manifest"),
        ("no-manifest", "cannot read"),
    ],
)
def test_a_damaged_artifact_names_the_file_and_the_remedy(
    artifact: Path, tmp_path: Path, change: str, message: str
) -> None:
    directory = copied(artifact, tmp_path / "copy")
    DAMAGES[change](directory)
    with pytest.raises(ArtifactError, match=message) as raised:
        open_onnx(RuntimeRequest(directory, CPU, slots=1, context_tokens=64, chunk_tokens=128))
    assert "overspill models" in raised.value.message


def test_a_file_that_is_no_model_is_an_artifact_error(artifact: Path, tmp_path: Path) -> None:
    directory = copied(artifact, tmp_path / "copy")
    (directory / "model.onnx").write_bytes(b"not a model")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["model.onnx"] = {"sha256": hashlib.sha256(b"not a model").hexdigest(), "bytes": 11}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="cannot load"):
        open_onnx(RuntimeRequest(directory, CPU, slots=1, context_tokens=64, chunk_tokens=128))


def test_an_earlier_versions_artifact_is_prepared_anew(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU lacks VNNI; zero points of its layers were one tensor."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("session_state.cc AddInitializedOrtValue: duplicated ort_value index")

    monkeypatch.setattr(ort, "InferenceSession", refuse)
    with pytest.raises(ArtifactError, match=r"models pull tiny\S* --prepare"):
        open_onnx(RuntimeRequest(artifact, CPU, slots=1, context_tokens=64, chunk_tokens=128))


def test_runtimes_are_opened_by_name(artifact: Path) -> None:
    runtime = open_runtime(RuntimeRequest(artifact, CPU, slots=1, context_tokens=64, chunk_tokens=128))
    assert runtime.facts.name == "onnx"
    runtime.close()
    with pytest.raises((ConfigError, ArtifactError), match=r"CUDA|tensorrt"):  # nobody built an engine for it
        open_runtime(RuntimeRequest(artifact, RuntimeOptions(name="tensorrt"), 1, context_tokens=64, chunk_tokens=16))
