"""The recipes of docs/extending.md, carried out: what they show is the code that runs here."""

from __future__ import annotations

import ast
import re
import sys
import types
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import pytest
from starlette.applications import Starlette

from edge_agent.config import LocalModels
from edge_agent.runtime.packed import Executor
from edge_agent.runtime.protocol import RuntimeRequest, StepInput
from hardware_profiles.loader import DeviceFacts, RuntimeOptions, choose_profile
from router.base.errors import ArtifactError
from router.dispatch.dispatcher import Dispatcher
from router.fleetwire.documents import OVERRIDABLE
from router.gateway.intake import Intake
from router.gateway.metrics import GatewayMetrics
from router.values.choice import Choice
from router.values.settings import RouterSettings
from tests.router.policy.test_policies import candidate, situation
from tests.support.clocks import VirtualClock
from tests.support.gateway_fakes import gateway_deps
from tests.support.paths import REPOSITORY
from tests.support.router_fakes import info, request
from tests.support.tiny_llama import Sizes, run_plain, write_artifact

PAGE = (REPOSITORY / "docs/extending.md").read_text(encoding="utf-8")


def block(path: str) -> str:
    """Return the fenced block that begins with the comment `# path`."""
    blocks = [text for _, text in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)]
    (found,) = [text for text in blocks if text.startswith(f"# {path}\n")]
    return found


def module(path: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the block of that path, as if the file were there."""
    name = path.removesuffix(".py").replace("/", ".")
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        monkeypatch.setattr(sys.modules[parent], leaf, made, raising=False)
    exec(compile(block(path), path, "exec"), made.__dict__)  # noqa: S102 - our own page
    return made


def test_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = module("router/policy/soonest.py", monkeypatch).POLICY
    slow, quick = candidate("int8", ttft_s=0.4), candidate("fp32", remote=True, ttft_s=0.1)
    choice = policy.decide(situation(slow, quick))
    assert isinstance(choice, Choice)
    assert choice.candidate is quick


def test_a_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runtimes = module("edge_agent/runtime/reference/runtime.py", monkeypatch)
    sizes = Sizes()
    artifact = write_artifact(tmp_path / "tiny-int8", sizes, prefix=(1,))
    opening = RuntimeRequest(artifact, RuntimeOptions(), slots=2, context_tokens=64, chunk_tokens=16)
    runtime = runtimes.open_reference(opening)
    ids = [1, *np.random.default_rng(7).integers(3, sizes.vocab, size=11).tolist()]
    sequence, cached = runtime.open(ids)
    for end in (7, len(ids)):
        logits = runtime.forward([StepInput(sequence, ids[cached:end], want_logits=end == len(ids))])
        cached = end
    np.testing.assert_allclose(logits[0], run_plain(artifact / "model.onnx", sizes, ids)["logits"][0][-1], atol=1e-4)
    runtime.close()
    asked = {name for name in (*Executor.__annotations__, *vars(Executor)) if not name.startswith("_")}
    assert asked <= {*dir(runtimes.ReferenceExecutor)}
    (artifact / "model.onnx").write_bytes(b"")
    with pytest.raises(ArtifactError):
        runtimes.open_reference(opening)


async def test_a_wire_format(monkeypatch: pytest.MonkeyPatch) -> None:
    module("router/wire/plain.py", monkeypatch)
    routes = module("router/gateway/plain_routes.py", monkeypatch)
    deps = gateway_deps()
    intake = Intake(deps, GatewayMetrics(deps.telemetry.registry))
    app = Starlette(routes=routes.PlainRoutes(intake).routes())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tier") as client:
        reply = await client.post("/plain", json={"model": "tiny", "prompt": "say a b c", "max_tokens": 2})
        assert reply.json() == {"text": "a b", "tokens": 2}
        assert reply.headers["x-overspill-model"] == "tiny-int8"
        assert (await client.post("/plain", json={"model": "tiny", "prompt": "say", "n": 2})).status_code == 400
        refused = await client.post("/plain", json={"model": "tiny", "prompt": "refuse shed"})
        assert (refused.status_code, refused.headers["retry-after-ms"]) == (429, "250")


async def test_a_replica_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = module("edge_agent/serving/canned.py", monkeypatch).CannedReplica(info("int8"), "We are closed.")
    clock = VirtualClock()
    async with Dispatcher([replica], RouterSettings(), clock=clock) as dispatcher:

        async def ask() -> str:
            answer = await dispatcher.start(request(clock, max_tokens=16))
            return "".join([chunk.text async for chunk in answer.chunks])

        assert await clock.run(ask()) == "We are closed."


def test_a_hardware_profile(tmp_path: Path) -> None:
    (tmp_path / "acme-gateway.toml").write_text(block("acme-gateway.toml"), encoding="utf-8")
    board = DeviceFacts("aarch64", 4 << 30, 4, board="Acme Gateway G2")
    match = choose_profile("auto", board, tmp_path)
    assert match.profile.name == "acme-gateway"
    assert match.profile.prior(134_515_008, "int8").decode_tokens_per_s == 25.0


def test_a_fleet_key() -> None:
    """The recipe for `[router]` ends at the struct because the whole table may be set; `[models]` names its keys."""
    assert OVERRIDABLE["router"] is None
    assert (OVERRIDABLE["models"] or frozenset()) <= {field.name for field in msgspec.structs.fields(LocalModels)}
    field = ast.parse(block("a field of RouterSettings, in router/values/settings.py")).body[0]
    assert isinstance(field, ast.AnnAssign)
    kind = eval(ast.unparse(field.annotation), {"Annotated": Annotated, "msgspec": msgspec})  # noqa: S307 - our own page
    assert msgspec.convert(5, kind) == 5
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(-1, kind)
