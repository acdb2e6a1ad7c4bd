"""What is installed, and how to install a part that is missing: from where this copy came, never from an index.

The project is on no index, so its bare name there would be somebody else's.
"""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

# library → the extra of `pyproject.toml` that brings it.
EXTRA_OF = {
    "torch": "cloud",
    "onnx": "cloud",
    "gguf": "cloud",
    "safetensors": "cloud",
    "ml_dtypes": "cloud",
    "onnxruntime": "edge",
    "tensorrt": "tensorrt",
    "vllm": "vllm",
    "scipy": "simulate",
    "grpc": "grpc",
    "google": "grpc",
    "opentelemetry": "otel",
    "pynvml": "nvml",
    "matplotlib": "simulate",
    "PIL": "vision",
}


def install(extra: str) -> str:
    """Return the command that installs an extra of this project."""
    folder = checkout()
    if folder is None:
        return f"pip install '.[{extra}]' in your checkout of Overspill"
    return f"pip install '{folder}[{extra}]'"


@functools.cache
def installed(distribution: str) -> str:
    """Return the version of a package that is installed, empty where none is."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def checkout() -> Path | None:
    """Return the folder that this copy was installed from, None where it is gone or was none."""
    try:
        record = metadata.distribution("overspill").read_text("direct_url.json")
        url = urlsplit(json.loads(record or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    folder = Path(unquote(url.path))
    return folder if url.scheme == "file" and (folder / "pyproject.toml").is_file() else None
