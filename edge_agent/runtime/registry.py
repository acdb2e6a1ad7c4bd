"""Runtimes by name, imported when chosen: a device without TensorRT never imports it.

A profile may name `tensorrt` in two ways. `name = "tensorrt"` wants an engine and nothing else. `tensorrt` among the
`providers` of `name = "onnx"` wants an engine where one was built, and else the providers behind it, visibly. Neither
builds: a build takes minutes and gigabytes, and belongs into `overspill models build`. ONNX Runtime's own TensorRT
provider builds inside the first run, so it is never used.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import cast

import msgspec

from edge_agent.runtime.manifest import Manifest
from edge_agent.runtime.protocol import Runtime, RuntimeFactory, RuntimeRequest
from router.base.cuda import first_gpu
from router.base.errors import ArtifactError, ConfigError
from router.base.extras import install

_RUNTIMES = {
    "onnx": "edge_agent.runtime.onnx.runtime:open_onnx",
    "tensorrt": "edge_agent.runtime.tensorrt.runtime:open_tensorrt",
}
_EXTRAS = {"onnx": "edge", "tensorrt": "tensorrt"}


def open_runtime(request: RuntimeRequest) -> Runtime:
    """Load the runtime that `request.options.name` names.

    Raises:
        ConfigError: unknown name, or its library is not installed.
        ArtifactError: the artifact cannot be loaded.
    """
    options = request.options
    if options.name not in _RUNTIMES:
        raise ConfigError(f"unknown runtime `{options.name}`; known: {', '.join(_RUNTIMES)}", param="runtime.name")
    if options.name != "onnx" or "tensorrt" not in options.providers:
        return _open(options.name, request)
    try:
        return _open("tensorrt", request)
    except (ConfigError, ArtifactError) as error:
        others = tuple(name for name in options.providers if name != "tensorrt") or ("cpu",)
        rest = msgspec.structs.replace(options, providers=others)
        return _open("onnx", dataclasses.replace(request, options=rest, missed=(f"tensorrt: {error.message}",)))


def engine_bytes(request: RuntimeRequest, manifest: Manifest) -> int | None:
    """Return the size of the TensorRT engine that `open_runtime` would load, None where it would load none."""
    options = request.options
    if options.name != "tensorrt" and not (options.name == "onnx" and "tensorrt" in options.providers):
        return None
    tensorrt = importlib.import_module("edge_agent.runtime.tensorrt.runtime")
    try:
        return int(tensorrt.find_plan(tensorrt.tensorrt_module(), manifest, request, first_gpu()).stat().st_size)
    except (ConfigError, ArtifactError, OSError):
        return None


def _open(name: str, request: RuntimeRequest) -> Runtime:
    module, attribute = _RUNTIMES[name].split(":")
    try:
        factory = cast("RuntimeFactory", getattr(importlib.import_module(module), attribute))
        return cast("Runtime", factory(request))
    except ModuleNotFoundError as error:
        remedy = install(_EXTRAS[name])
        raise ConfigError(f"runtime `{name}` needs `{error.name}`; run: {remedy}", param="runtime.name") from error
