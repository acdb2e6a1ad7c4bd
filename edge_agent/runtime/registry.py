"""Runtimes by name, imported when chosen: a device without TensorRT never imports it."""

from __future__ import annotations

import importlib
from typing import cast

from edge_agent.runtime.protocol import Runtime, RuntimeFactory, RuntimeRequest
from router.base.errors import ConfigError
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
    name = request.options.name
    if name not in _RUNTIMES:
        raise ConfigError(f"unknown runtime `{name}`; known: {', '.join(_RUNTIMES)}", param="runtime.name")
    module, attribute = _RUNTIMES[name].split(":")
    try:
        factory = cast("RuntimeFactory", getattr(importlib.import_module(module), attribute))
        return cast("Runtime", factory(request))
    except ModuleNotFoundError as error:
        remedy = install(_EXTRAS[name])
        raise ConfigError(f"runtime `{name}` needs `{error.name}`; run: {remedy}", param="runtime.name") from error
