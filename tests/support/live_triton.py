"""A real Triton inference server, from the wheel `nvidia-pytriton`, with two models in Python that need no weights.

`OVERSPILL_LIVE_TRITON` names a Python with that wheel. Both models answer with the words after those of their prompt:
`one two` → ` w2 w3 w4 …`, so that an answer can be continued, and checked to the letter, anywhere.

| model      | answers                                             |
|------------|-----------------------------------------------------|
| `counting` | word by word (decoupled), one every `PACE_S`        |
| `whole`    | in one piece, up to 4 requests in a batch           |
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tests.support.live_servers import LiveServer, live_python
from tests.support.ports import unused_port

PACE_S = 0.05
# Longer than a probe waits: an HTTP thread of Triton that loads a model leaves its other connections unanswered.
LOADING_S = 6.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton's Python backend keeps it, under a name of ours

_FIND = """
import importlib.util, sys, sysconfig
(package,) = importlib.util.find_spec("pytriton").submodule_search_locations
print(package, sysconfig.get_config_var("LIBDIR"), "%d.%d" % sys.version_info[:2], sep="\\n")
"""
_CONFIG = """
backend: "python"
max_batch_size: {batch}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }}
]
output [ {{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 2 }} ]
parameters {{ key: "max_model_len" value: {{ string_value: "512" }} }}
"""
_COMMON = """
import json, time
import numpy as np
import triton_python_backend_utils as pb_utils

def each(request):
    texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)
    limits = pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy().reshape(-1)
    for text, limit in zip([text.decode() for text in texts], limits):
        print("asked:", text, flush=True)
        first = len(text.split())
        yield text, [f" w{first + index}" for index in range(int(limit))]

def answer(texts, *shape):
    output = np.array([text.encode() for text in texts], object).reshape(shape)
    return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", output)])

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(LOADING_S)
"""
_COUNTING = """
    def execute(self, requests):
        for request in requests:
            sender, (text, words) = request.get_response_sender(), next(each(request))
            for index, word in enumerate(words):
                if sender.is_cancelled():
                    print("cancelled:", text, flush=True)
                    break
                if text.startswith("fails") and index == 3:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("it was told to fail")))
                    break
                sender.send(answer([word], 1))
                time.sleep(PACE_S)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_WHOLE = """
    def execute(self, requests):
        return [self.answered(list(each(request))) for request in requests]

    def answered(self, found):
        if any(text.startswith("fails") for text, _ in found):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("it was told to fail"))
        return answer(["".join(words) for _, words in found], len(found), 1)
"""


def _write_models(folder: Path) -> Path:
    head = _COMMON.replace("LOADING_S", str(LOADING_S))
    decoupled = "model_transaction_policy { decoupled: true }\n"
    for name, batch, policy, body in (("counting", 0, decoupled, _COUNTING), ("whole", 4, "", _WHOLE)):
        home = folder / "models" / name / "1"
        home.mkdir(parents=True, exist_ok=True)
        (home / "model.py").write_text(head + body.replace("PACE_S", str(PACE_S)))
        (home.parent / "config.pbtxt").write_text(_CONFIG.format(batch=batch) + policy)
    return folder / "models"


class TritonServer(LiveServer):
    """One Triton.

    Attributes:
        metrics_url: where it exports its load.
    """

    metrics_url = ""


@contextlib.asynccontextmanager
async def triton_server(folder: Path, *args: str, name: str = "triton") -> AsyncIterator[TritonServer]:
    """Run a Triton with both models on free ports, and remove its shared memory after it.

    Args:
        args: further flags.
        name: of its log in `folder`.
    """
    server, region = _prepared(folder, args, name)
    try:
        async with server:
            yield server
    finally:
        _free(region)


def _prepared(folder: Path, args: Sequence[str], name: str) -> tuple[TritonServer, str]:
    python, port, metrics_port = live_python("OVERSPILL_LIVE_TRITON"), unused_port(), unused_port()
    told = subprocess.run([python, "-c", _FIND], check=True, capture_output=True, text=True).stdout.split("\n")
    package, libraries, version = Path(told[0]), told[1], told[2]
    home, backend = package / "tritonserver", folder / "backends" / "python"
    shutil.copytree(home / "backends" / "python", backend, dirs_exist_ok=True)
    stub = shutil.copy(home / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    Path(stub).chmod(0o755)
    region = f"overspill_test_{port}_"
    argv = [str(home / "bin" / "tritonserver"), f"--model-repository={_write_models(folder)}"]
    argv += [f"--backend-directory={backend.parent}", f"--backend-config=python,shm-region-prefix-name={region}"]
    argv += ["--http-address=127.0.0.1", f"--http-port={port}", "--allow-grpc=false"]
    argv += ["--metrics-address=127.0.0.1", f"--metrics-port={metrics_port}", *args]
    env = {
        "LD_LIBRARY_PATH": f"{package.parent / 'nvidia_pytriton.libs'}:{libraries}",
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "PYTHONPATH": "",
    }
    server = TritonServer(name, argv, port, folder / f"{name}.log", env=env, ready_path="/v2/health/ready")
    server.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
    return server, region


def _free(region: str) -> None:
    for left in _SHARED_MEMORY.glob(f"{region}*"):
        left.unlink(missing_ok=True)
