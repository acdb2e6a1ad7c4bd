"""The house plan, enforced: who may import whom (docs/architecture.md), on which floor, and what stays unloaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

PACKAGES = ("edge_agent", "cloud_tier", "router", "models", "hardware_profiles")

# Floors of a house, the lowest first: of a package, and of a room that has rooms of its own. A room may import itself
# and the rooms of lower floors, none beside it: rooms of one floor do not know each other. Every file is in a room.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "router": (
        ("router.base",),
        ("router.values", "router.fleetwire", "router.client"),
        ("router.wire", "router.signals", "router.decisions", "router.tracing", "router.tenants", "router.cache"),
        ("router.policy", "router.upstream", "router.jobs"),
        ("router.dispatch",),
        ("router.gateway", "router.simulation"),
        ("router.replay",),
    ),
    "edge_agent": (
        ("edge_agent.mqtt",),
        ("edge_agent.config", "edge_agent.device", "edge_agent.outbox"),
        ("edge_agent.runtime",),
        ("edge_agent.generate",),
        ("edge_agent.batching",),
        ("edge_agent.serving",),
        ("edge_agent.fleet",),
        ("edge_agent.report", "edge_agent.metrics", "edge_agent.upstream"),
        ("edge_agent.daemon",),
        ("edge_agent.cli",),
    ),
    "models": (
        ("models.formats", "models.pipelines"),
        ("models.text", "models.catalogue"),
        ("models.store",),
        ("models.graph",),
        ("models.measure", "models.prune", "models.tensorrt"),
        ("models.encoder", "models.int8", "models.progress", "models.show", "models.vision"),
        ("models.cli",),
    ),
    "cloud_tier": (
        ("cloud_tier.engines", "cloud_tier.scaling"),
        (
            "cloud_tier.config",
            "cloud_tier.engine",
            "cloud_tier.fleet",
            "cloud_tier.gpu_watch",
            "cloud_tier.gpus",
            "cloud_tier.prompts",
        ),
        (
            "cloud_tier.answers",
            "cloud_tier.encoders",
            "cloud_tier.jobs",
            "cloud_tier.lineup",
            "cloud_tier.status",
            "cloud_tier.tenants",
            "cloud_tier.warm_up",
        ),
        ("cloud_tier.backends", "cloud_tier.engine_check", "cloud_tier.replicas"),
        ("cloud_tier.metrics", "cloud_tier.plan", "cloud_tier.repository"),
        ("cloud_tier.server",),
        ("cloud_tier.cli", "cloud_tier.ray_serve"),
    ),
    "hardware_profiles": (("hardware_profiles.loader",), ("hardware_profiles.facts",)),
    "router.upstream": (
        ("router.upstream.http", "router.upstream.settings", "router.upstream.source"),
        ("router.upstream.codec",),
        ("router.upstream.exchange",),
        ("router.upstream.servers", "router.upstream.disaggregated", "router.upstream.discovery"),
        ("router.upstream.backend", "router.upstream.backend_check"),
        ("router.upstream.sources",),
    ),
    "router.dispatch": (
        ("router.dispatch.records",),
        ("router.dispatch.attempts", "router.dispatch.replicas"),
        ("router.dispatch.assessment", "router.dispatch.probes"),
        ("router.dispatch.binding",),
        ("router.dispatch.admission", "router.dispatch.status"),
        ("router.dispatch.journey",),
        ("router.dispatch.dispatcher",),
    ),
}

GROUND = ("router.base", "router.values", "router.fleetwire")
ONLINE_MODELS = ("models.catalogue", "models.store", "models.text", "models.formats", "models.pipelines")

# room → (what it may import of other packages, libraries it must not import); the longest prefix that matches rules.
ARROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "edge_agent": (("router", "hardware_profiles", *ONLINE_MODELS), ("torch", "gguf")),
    "cloud_tier": (("router", "hardware_profiles", *ONLINE_MODELS), ("onnxruntime", "tensorrt")),
    "router": ((), ("torch", "tensorrt", "onnxruntime", "paho", "gguf", "opentelemetry")),
    "router.tracing": ((), ("torch", "tensorrt", "onnxruntime", "paho", "gguf", "fastapi", "httpx")),
    **dict.fromkeys(GROUND, ((), ("torch", "tensorrt", "onnxruntime", "paho", "fastapi", "httpx"))),
    "router.policy": ((), ("torch", "tensorrt", "onnxruntime", "paho", "fastapi", "httpx", "asyncio")),
    "models": (GROUND, ("fastapi", "paho")),
    "models.cli": ((*GROUND, "hardware_profiles"), ("torch", "onnxruntime", "onnx", "fastapi", "paho")),
    **dict.fromkeys(ONLINE_MODELS, (GROUND, ("torch", "onnxruntime", "onnx", "fastapi", "paho"))),
    "hardware_profiles": (GROUND, ("torch", "onnxruntime", "fastapi", "httpx", "paho")),
}

MOST_FILES_IN_A_ROOT = 8


def _modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every import of a file, also those for type checkers only, as the most exact module and the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the room in full"
            module = str(node.module)
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                yield whole if whole in MODULES else module, node.lineno


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _room(module: str, house: str) -> tuple[int, str] | None:
    """Return floor and room of a module in a house, None for the house itself."""
    for level, rooms in enumerate(FLOORS[house]):
        for room in rooms:
            if _within(module, (room,)):
                return level, room
    return None


def _upward(module: str, name: str) -> str:
    """Say why a module must not import another: in some house that both are in it lies no lower. Empty if it may."""
    for house in FLOORS:
        if _within(module, (house,)) and _within(name, (house,)):
            here, there = _room(module, house), _room(name, house)
            if here is not None and there is not None and there[1] != here[1] and there[0] >= here[0]:
                return f"{there[1]} is not below {here[1]}"
    return ""


def faults(module: str, path: Path) -> list[str]:
    """Say what a file imports and must not, from the room that it lies in."""
    package = module.split(".", maxsplit=1)[0]
    for house in FLOORS:
        if module != house and _within(module, (house,)) and _room(module, house) is None:
            return [f"{path}: {module} lies in no room: name its floor in FLOORS"]
    allowed, forbidden = ARROWS[max((p for p in ARROWS if _within(module, (p,))), key=len)]
    found = []
    for name, line in _imports(path):
        top = name.split(".")[0]
        wrong = ""
        if top == package:
            wrong = _upward(module, name)
        elif top in PACKAGES and not _within(name, allowed):
            wrong = f"{package} does not look there"
        elif _within(name, forbidden):
            wrong = f"{module} does without that library"
        if wrong:
            found.append(f"{path}:{line}: {module} must not import {name}: {wrong}")
    return found


@pytest.mark.parametrize(("module", "path"), list(MODULES.items()), ids=list(MODULES))
def test_imports_follow_the_arrows(module: str, path: Path) -> None:
    assert not faults(module, path)


def test_a_file_in_the_wrong_room_is_found() -> None:
    """The test itself can fail: a policy that lay in `router.values`, a codec that lay in `router.base`."""
    policy, codec = MODULES["router.policy.quality_in_objective"], MODULES["router.wire.openai.chat"]
    assert any("router.policy is not below router.values" in fault for fault in faults("router.values.policy", policy))
    assert any("router.values is not below router.base" in fault for fault in faults("router.base.openai", codec))
    assert faults("router.policy.quality_in_objective", policy) == faults("router.wire.openai.chat", codec) == []
    assert "lies in no room" in faults("router.helpers", codec)[0]
    dispatcher = MODULES["router.dispatch.dispatcher"]
    assert "lies in no room" in faults("router.dispatch.helpers", dispatcher)[0]
    assert any(
        "router.dispatch.journey is not below router.dispatch.binding" in fault
        for fault in faults("router.dispatch.binding.dispatcher", dispatcher)
    )
    assert "router does not look there" in faults("router.wire.x", MODULES["edge_agent.fleet.steering"])[0]


def test_no_import_goes_in_a_circle() -> None:
    graph = {module: {name for name, _ in _imports(path)} & MODULES.keys() for module, path in MODULES.items()}
    assert _circle(graph) == []
    assert sorted(_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == ["b", "c"]


def _circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules that are left when all that import nothing of the rest are taken away, again and again."""
    left = {module: set(names) for module, names in graph.items()}
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    while unused := [module for module in left if not any(module in names for names in left.values())]:
        for module in unused:
            del left[module]
    return list(left)


@pytest.mark.parametrize("package", ["router", "edge_agent", "models"])
def test_a_package_root_holds_few_files(package: str) -> None:
    files = sorted(path.name for path in (REPOSITORY / package).iterdir() if path.is_file())
    assert len(files) <= MOST_FILES_IN_A_ROOT, files


@pytest.mark.process
@pytest.mark.parametrize(
    ("module", "unloaded"),
    [
        (
            "edge_agent.daemon",
            ("torch", "onnxruntime", "cloud_tier", "gguf", "onnx", "opentelemetry.sdk", "grpc", "google.protobuf"),
        ),
        ("router.dispatch.dispatcher", ("torch", "onnxruntime", "paho", "fastapi", "edge_agent", "opentelemetry")),
        (
            "cloud_tier.server",
            ("torch", "onnxruntime", "edge_agent", "opentelemetry.sdk", "pynvml", "grpc"),
        ),
        ("overspill", ("torch", "onnxruntime", "fastapi", "httpx", "edge_agent", "cloud_tier", "models")),
        ("models.cli", ("torch", "onnx", "onnxruntime", "httpx")),
    ],
)
def test_importing_leaves_unloaded(module: str, unloaded: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(sorted(set({unloaded!r}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
