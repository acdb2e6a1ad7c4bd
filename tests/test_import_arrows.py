"""The house plan, enforced: who may import whom (docs/architecture.md), and what stays unloaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

PACKAGES = ("edge_agent", "cloud_tier", "router", "models", "hardware_profiles")
_FLOOR = ("errors", "clock", "config", "telemetry", "wire", "answer", "replica", "link", "cores", "heap", "extras")
GROUND = tuple(f"router.{room}" for room in _FLOOR)
ONLINE_MODELS = (
    "models.catalog",
    "models.store",
    "models.text.tokenizer",
    "models.text.chat",
    "models.formats.weights",
)

# module prefix → (allowed house prefixes, forbidden libraries); the longest prefix that matches rules.
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "edge_agent": (("edge_agent", "router", "hardware_profiles", *ONLINE_MODELS), ("torch", "gguf")),
    "cloud_tier": (("cloud_tier", "router", "hardware_profiles", *ONLINE_MODELS), ("onnxruntime", "tensorrt")),
    "router": (("router", "hardware_profiles"), ("torch", "tensorrt", "onnxruntime", "paho", "gguf")),
    **dict.fromkeys(GROUND, (GROUND, ("torch", "tensorrt", "onnxruntime", "paho", "fastapi", "httpx"))),
    "models": (("models", *GROUND), ("fastapi", "paho")),
    "models.cli": (("models", "hardware_profiles", *GROUND), ("torch", "onnxruntime", "onnx", "fastapi", "paho")),
    **dict.fromkeys(ONLINE_MODELS, (("models", *GROUND), ("torch", "onnxruntime", "onnx", "fastapi", "paho"))),
    "hardware_profiles": (("hardware_profiles", *GROUND), ("torch", "onnxruntime", "fastapi", "httpx", "paho")),
}


def _modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = list(path.relative_to(REPOSITORY).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the room in full"
            module = str(node.module)
            if module in PACKAGES or module == "router.wire":
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize(
    ("module", "path"), list(_modules()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_follow_the_arrows(module: str, path: Path) -> None:
    prefix = max((p for p in RULES if _within(module, (p,))), key=len)
    allowed, forbidden = RULES[prefix]
    for name, line in _imports(path):
        if name.split(".")[0] in PACKAGES:
            assert _within(name, allowed), f"{path}:{line}: {module} must not import {name}"
        assert not _within(name, forbidden), f"{path}:{line}: {module} must not import {name}"


@pytest.mark.parametrize(
    ("module", "unloaded"),
    [
        ("edge_agent.daemon", ("torch", "onnxruntime", "cloud_tier", "gguf", "onnx")),
        ("router.dispatch.dispatcher", ("torch", "onnxruntime", "paho", "fastapi", "edge_agent", "cloud_tier")),
        ("cloud_tier.server", ("torch", "onnxruntime", "edge_agent")),
        ("overspill", ("torch", "onnxruntime", "fastapi", "httpx", "edge_agent", "cloud_tier", "models")),
        ("models.cli", ("torch", "onnx", "onnxruntime", "httpx")),
    ],
)
def test_importing_leaves_unloaded(module: str, unloaded: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(sorted(set({unloaded!r}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
