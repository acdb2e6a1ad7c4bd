"""A catalogue file of one family that no real model stands behind, and the bytes of its source."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

BODY = bytes(range(256)) * 4000  # 1 MB
SHA = hashlib.sha256(BODY).hexdigest()

TOY = """\
name = "toy"
title = "Toy"
parameters = 10
context_tokens = 64
licence = "MIT"

[[sources]]
uri = "file:/models/toy.gguf"

[[variants]]
name = "toy-fp32"
rung = 0
quality = 1.0
quality_measured = "the reference"
precision = "fp32"
format = "weights"

[[variants]]
name = "toy-int8"
rung = 1
quality = 0.9
quality_measured = "a test"
precision = "int8"
format = "onnx"
layers = [0, 2]
derived_from = "toy-fp32"
"""


def fill(folder: Path, body: bytes) -> None:
    (folder / "model.onnx").write_bytes(body)
    files = {"model.onnx": {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
