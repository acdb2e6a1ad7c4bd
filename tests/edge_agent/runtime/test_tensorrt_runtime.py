"""The TensorRT executor against a stand-in for TensorRT and CUDA that computes with ONNX Runtime on the same addresses.

It shows that shapes, addresses and refusals are handled; that a real GPU agrees can only be shown on one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import types
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import onnxruntime as ort
import pytest

from edge_agent.runtime.manifest import read_manifest, read_prefix
from edge_agent.runtime.packed import PackedRuntime
from edge_agent.runtime.protocol import RuntimeRequest, StepInput
from edge_agent.runtime.tensorrt.runtime import TensorRtExecutor, find_plan
from hardware_profiles.loader import RuntimeOptions
from router.base.cuda import Cuda, Gpu
from router.base.errors import ArtifactError
from tests.support.tiny_llama import Sizes, run_plain, write_artifact

SIZES = Sizes()


class HostCuda(Cuda):
    """Memory of the host, where there is no GPU."""

    def __init__(self) -> None:
        self.stream = 7

    def empty(self, shape, dtype):
        return np.zeros(shape, dtype)

    def device_address(self, array):
        assert array.size
        assert array.flags.c_contiguous
        return array.ctypes.data

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


class Context:
    def __init__(self, session: ort.InferenceSession) -> None:
        self.session = session
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name, shape):
        if shape[0] > 3:
            return False
        self.shapes[name] = tuple(shape)
        return True

    def infer_shapes(self):
        return [item.name for item in self.session.get_inputs() if item.name not in self.shapes]

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        assert stream == HostCuda().stream
        feeds = {}
        for item in self.session.get_inputs():
            dtype = np.int64 if "int64" in item.type else np.float32
            shape = self.shapes[item.name]
            raw = ctypes.string_at(self.addresses[item.name], int(np.prod(shape)) * np.dtype(dtype).itemsize)
            feeds[item.name] = np.frombuffer(raw, dtype).reshape(shape)
        names = [item.name for item in self.session.get_outputs()]
        for name, value in zip(names, self.session.run(names, feeds), strict=True):
            data = np.ascontiguousarray(value)
            ctypes.memmove(self.addresses[name], data.ctypes.data, data.nbytes)
        return True


class Engine:
    def __init__(self, raw: bytes) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        self.names = [item.name for item in [*self.session.get_inputs(), *self.session.get_outputs()]]
        self.num_io_tensors = len(self.names)

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_dtype(self, name):
        return "int64" if name in ("input_ids", "position_ids", "logits_at") else "float"

    def create_execution_context(self):
        return Context(self.session)


class ILogger:
    Severity = types.SimpleNamespace(WARNING=2)


class Runtime:
    def __init__(self, log) -> None:
        self.log = log

    def deserialize_cuda_engine(self, raw):
        if raw == b"of another version":
            self.log.log(1, "the engine was built by TensorRT 8")
            return None
        return Engine(raw)


class FakeTrt(types.SimpleNamespace):
    DataType: ClassVar = types.SimpleNamespace(FLOAT="float", INT64="int64")


TRT = FakeTrt(__name__="tensorrt", __version__="10.3", ILogger=ILogger, Runtime=Runtime)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_artifact(tmp_path_factory.mktemp("tiny") / "tiny-int8", SIZES, prefix=(1,))
    engines = directory.parent / "engines"
    engines.mkdir()
    raw = (directory / "model.onnx").read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    for number, (version, onnx) in enumerate([("10.3", digest), ("10.2", digest), ("10.3", "0" * 64)]):
        name = f"tiny-int8-{number}"
        (engines / f"{name}.plan").write_bytes(raw if number == 0 else b"of another version")
        key = {
            "variant": "tiny-int8",
            "onnx": {"model.onnx": onnx},
            "runtime": "tensorrt",
            "version": version,
            "target": "sm87",
            "cuda": 12060,
            "options": {"batch": [1, 1, 4], "new_tokens": [1, 1, 128], "past_tokens": [1, 64, 256]},
        }
        record = {"key": key, "engine": {"plan": f"{name}.plan"}}
        (engines / f"{name}.json").write_text(json.dumps(record))
    (engines / "tiny-int8-9.json").write_text("{")
    return directory


def asked(artifact: Path, *, slots: int = 4, context: int = 256, chunk: int = 128) -> RuntimeRequest:
    return RuntimeRequest(artifact, RuntimeOptions(name="tensorrt"), slots, context, chunk)


def opened(artifact: Path) -> PackedRuntime:
    manifest = read_manifest(artifact)
    request = asked(artifact)
    executor = TensorRtExecutor(TRT, HostCuda(), find_plan(TRT, manifest, request))
    return PackedRuntime(executor, manifest, read_prefix(artifact, manifest), request)


def test_chunks_and_batches_equal_the_plain_run(artifact: Path) -> None:
    runtime = opened(artifact)
    ids = [[1, *np.random.default_rng(seed).integers(3, 60, size=90).tolist()] for seed in range(3)]
    expected = [run_plain(artifact / "model.onnx", SIZES, row)["logits"][0] for row in ids]
    sequences = []
    for row in ids:
        sequence, cached = runtime.open(row)
        runtime.forward([StepInput(sequence, row[cached:40], want_logits=False)])
        sequences.append(sequence)
    for position in range(40, 91):
        batch = [StepInput(sequence, [row[position]]) for sequence, row in zip(sequences, ids, strict=True)]
        for logits, row in zip(runtime.forward(batch), expected, strict=True):
            np.testing.assert_allclose(logits, row[position], atol=2e-4)
    assert runtime.facts.providers == ("tensorrt 10.3",)
    runtime.close()


def test_a_prompt_without_prefix_starts_on_a_past_that_is_all_masked(artifact: Path) -> None:
    runtime = opened(artifact)
    sequence, cached = runtime.open([5, 6, 7])
    assert cached == 0
    logits = runtime.forward([StepInput(sequence, [5, 6, 7])])
    expected = run_plain(artifact / "model.onnx", SIZES, [5, 6, 7])["logits"][0]
    np.testing.assert_allclose(logits[0], expected[-1], atol=1e-4)


def test_a_shape_beyond_the_profile_says_so(artifact: Path) -> None:
    runtime = opened(artifact)
    sequences = [runtime.open([5])[0] for _ in range(4)]
    with pytest.raises(RuntimeError, match="profile does not allow"):
        runtime.forward([StepInput(sequence, [5]) for sequence in sequences])


@pytest.mark.parametrize("beyond", [{"slots": 5}, {"chunk": 129}, {"context": 257}])
def test_an_engine_smaller_than_what_is_served_is_refused_with_the_command(
    artifact: Path, beyond: dict[str, int]
) -> None:
    request = asked(artifact, **beyond)
    manifest = msgspec.structs.replace(read_manifest(artifact), context_tokens=512)
    assert find_plan(TRT, manifest, asked(artifact)).name == "tiny-int8-0.plan"
    with pytest.raises(ArtifactError, match=r"tiny-int8-0\.plan is for 4 sequences of 256 tokens") as raised:
        find_plan(TRT, manifest, request)
    assert raised.value.message.endswith(
        f"overspill models build tiny-int8 --runtime tensorrt --batch {request.slots} --chunk {request.chunk_tokens} "
        f"--context {request.context_tokens}"
    )


def test_a_newer_plan_for_another_gpu_does_not_hide_the_right_one(artifact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(artifact.parent, tmp_path / "family")
    engines = folder / "engines"
    record = json.loads((engines / "tiny-int8-0.json").read_text())
    for name, target, cuda in (("a", "sm86", 12060), ("b", "sm110", 12060), ("c", "sm87", 13020)):
        key = {**record["key"], "target": target, "cuda": cuda}
        (engines / f"tiny-int8-{name}.plan").write_bytes(b"newer")
        (engines / f"tiny-int8-{name}.json").write_text(
            json.dumps({"key": key, "engine": {"plan": f"tiny-int8-{name}.plan"}})
        )
        os.utime(engines / f"tiny-int8-{name}.plan", (2e9, 2e9))
    manifest, request = read_manifest(artifact), asked(folder / artifact.name)

    def found(capability: tuple[int, int], cuda: int) -> str:
        return find_plan(TRT, manifest, request, Gpu("a GPU", capability, 8 << 30, cuda)).name

    assert found((8, 7), 12060) == "tiny-int8-0.plan"
    assert found((8, 7), 13020) == "tiny-int8-c.plan"
    assert found((8, 7), 13000) == "tiny-int8-c.plan", "no plan of this CUDA version: the newest may still load"
    assert found((11, 0), 13000) == "tiny-int8-b.plan"
    with pytest.raises(ArtifactError, match=r"is for sm86, this GPU is sm90"):
        found((9, 0), 13000)


def test_the_models_own_window_is_enough(artifact: Path) -> None:
    manifest = msgspec.structs.replace(read_manifest(artifact), context_tokens=200)
    assert find_plan(TRT, manifest, asked(artifact, context=8192)).name == "tiny-int8-0.plan"


@pytest.mark.parametrize("context", [100, 256])
def test_the_past_never_outgrows_the_window(artifact: Path, context: int) -> None:
    runtime = PackedRuntime(
        TensorRtExecutor(TRT, HostCuda(), artifact.parent / "engines" / "tiny-int8-0.plan"),
        read_manifest(artifact),
        None,
        asked(artifact, context=context),
    )
    sequence, _ = runtime.open([5])
    for _ in range(context - 1):
        runtime.forward([StepInput(sequence, [5])])
        assert runtime._pack.past_tokens <= context


def test_a_missing_or_foreign_engine_says_what_to_do(artifact: Path, tmp_path: Path) -> None:
    newer = FakeTrt(**{**vars(TRT), "__version__": "10.16"})
    with pytest.raises(ArtifactError, match="overspill models build tiny-int8 --runtime tensorrt"):
        find_plan(newer, read_manifest(artifact), asked(artifact))
    with pytest.raises(ArtifactError, match="build the engine on this device"):
        TensorRtExecutor(TRT, HostCuda(), tmp_path / "model.plan")
    (tmp_path / "model.plan").write_bytes(b"of another version")
    with pytest.raises(ArtifactError, match="built by TensorRT 8"):
        TensorRtExecutor(TRT, HostCuda(), tmp_path / "model.plan")
