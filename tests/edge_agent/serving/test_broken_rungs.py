"""One broken rung is one broken rung: the agent starts, serves the rest, says what is wrong, and heals."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import edge_agent.generate.loop as loop_module
import edge_agent.serving.lineup as lineup_module
import edge_agent.serving.local_models as local_models_module
from edge_agent.fleet.steering import Steering
from edge_agent.report import check_lines
from router.base.errors import ArtifactError, OverspillError
from tests.edge_agent.test_daemon import CHAT, desired
from tests.support.agents import served
from tests.support.tiny_store import TinyWorld, build_world
from tests.support.waiting import until

TOP, SMALL = "tiny-int8", "tiny-pruned-int8"


@pytest.fixture
def world(tmp_path: Path) -> TinyWorld:
    return build_world(tmp_path / "world")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineup_module, "_TEND_S", 0.05)
    monkeypatch.setattr(lineup_module, "_DESCRIBE_PAUSE_S", (0.05, 0.2))
    monkeypatch.setattr(loop_module, "_RELOAD_PAUSE_S", (0.05, 0.2))


def _flip(folder: Path) -> None:
    raw = bytearray((folder / "model.onnx").read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / "model.onnx").write_bytes(raw)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": _flip,
    "short": lambda folder: (folder / "model.onnx").write_bytes(b"x"),
    "no-model": lambda folder: (folder / "model.onnx").unlink(),
    "no-manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest": lambda folder: (folder / "manifest.json").write_text("{"),
    "manifest-is-a-list": lambda folder: (folder / "manifest.json").write_text("[]"),
    "gone": shutil.rmtree,
    "a-file": lambda folder: (shutil.rmtree(folder), folder.write_text("no folder")),
    "another-variant": lambda folder: (
        shutil.rmtree(folder),
        shutil.copytree(next(path for path in folder.parent.iterdir() if path.is_dir()), folder),
    ),
}


def break_rung(world: TinyWorld, variant: str, damage: str) -> Callable[[], None]:
    """Damage a rung; return what repairs it as the toolchain does: in one rename."""
    folder = world.store / "tiny" / variant
    kept = shutil.copytree(folder, world.store.parent / f"kept-{variant}")
    DAMAGES[damage](folder)

    def repair() -> None:
        if folder.is_dir():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
        kept.replace(folder)

    return repair


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("variant", [TOP, SMALL], ids=["preloaded", "on-demand"])
async def test_a_broken_rung_leaves_the_other_one_serving_and_heals(
    world: TinyWorld, variant: str, damage: str
) -> None:
    repair = break_rung(world, variant, damage)
    other = TOP if variant == SMALL else SMALL
    with pytest.raises(OverspillError):
        list(check_lines(world.config()))
    async with served(world.config()) as (agent, client):
        broken = next(item for item in agent.lineup.replicas if item.info.variant == variant)
        await until(lambda: broken.problem)  # an on-demand rung is looked at in the background
        assert (await client.get("/health/ready")).status_code == 200
        reply = await client.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-overspill-model"] == other
        decision = (await client.get(f"/v1/decisions/{reply.headers['x-request-id']}")).text
        assert '"unhealthy"' in decision
        pinned = await client.post("/v1/chat/completions", json={**CHAT, "model": variant})
        assert pinned.status_code == 503
        assert "retry-after" in pinned.headers
        metrics = (await client.get("/metrics")).text
        assert f'overspill_edge_model_failed{{variant="{variant}"}} 1.0' in metrics
        assert f'overspill_edge_model_failed{{variant="{other}"}} 0.0' in metrics
        told = {model.variant: model for model in Steering(agent).describe().models}
        assert told[variant].state == "failed"
        assert told[variant].reason
        assert told[other].state == "loaded"
        repair()
        await until(lambda: not any(item.problem for item in agent.lineup.replicas))
        healed = await client.post("/v1/chat/completions", json={**CHAT, "model": variant})
        assert healed.status_code == 200, healed.text


async def test_with_every_rung_broken_the_agent_stays_up_says_so_and_heals(world: TinyWorld) -> None:
    repairs = [break_rung(world, TOP, "gone"), break_rung(world, SMALL, "flipped")]
    async with served(world.config()) as (agent, client):
        await until(lambda: all(item.problem for item in agent.lineup.replicas))
        ready = await client.get("/health/ready")
        assert ready.status_code == 503
        assert "overspill models pull tiny" in ready.text
        assert "model.onnx is damaged" in ready.text
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert (await client.get("/health/live")).status_code == 200
        for repair in repairs:
            repair()
        await until(lambda: agent.ready()[0] and agent.lineup.replicas[0].loaded)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_with_every_rung_broken_the_upstream_answers(world: TinyWorld, tmp_path: Path) -> None:
    behind_world = build_world(tmp_path / "behind")
    async with served(behind_world.config()) as (behind, _):
        for variant in (TOP, SMALL):
            break_rung(world, variant, "gone")
        async with served(world.config(upstream={"url": f"http://127.0.0.1:{behind.port}"})) as (agent, client):
            await until(lambda: agent.dispatcher.known_models() and len(agent.infos()) == 4)
            assert (await client.get("/health/ready")).status_code == 200
            reply = await client.post("/v1/chat/completions", json=CHAT)
            assert reply.status_code == 200, reply.text


async def test_too_little_memory_at_boot_is_waited_out(world: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 20]
    monkeypatch.setattr(local_models_module, "available_bytes", lambda: free[0])
    async with served(world.config()) as (agent, client):
        ready = await client.get("/health/ready")
        assert ready.status_code == 200  # the on-demand rung was not tried
        assert "1 MiB are free" in agent.lineup.replicas[0].problem
        free[0] = 8 << 30
        await until(lambda: agent.lineup.replicas[0].loaded)
        assert (await client.post("/v1/chat/completions", json=CHAT)).headers["x-overspill-model"] == TOP


async def test_a_fleet_change_to_a_broken_rung_is_applied_and_the_rung_reported_as_failed(world: TinyWorld) -> None:
    repair = break_rung(world, SMALL, "gone")
    async with served(world.config(models={"variants": [TOP], "preload": [TOP]})) as (agent, client):
        steering = Steering(agent)
        await steering.apply(desired(1, models={"variants": [TOP, SMALL], "preload": [TOP, SMALL]}))
        told = {model.variant: model for model in steering.describe().models}
        assert (told[TOP].state, told[SMALL].state) == ("loaded", "failed")
        assert "overspill models pull" in told[SMALL].reason
        assert any(SMALL in line for line in steering.snapshot().errors)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        repair()
        await until(lambda: not any(item.problem for item in agent.lineup.replicas))


async def test_a_broken_tokenizer_is_replaced_by_that_of_another_rung(world: TinyWorld) -> None:
    folder = world.store / "tiny" / TOP
    (folder / "tokenizer.json").write_text("{}")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["tokenizer.json"] = {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    async with served(world.config()) as (agent, client):
        assert agent.lineup.replicas[0].problem
        reply = await client.post("/v1/chat/completions", json=CHAT)
        assert reply.headers["x-overspill-model"] == SMALL


async def test_the_fleet_and_the_service_manager_are_told_when_a_rung_fails_or_heals(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("edge_agent.daemon.systemd.notify", told.append)
    repair = break_rung(world, TOP, "gone")
    async with served(world.config()) as (agent, _):
        assert any(line.startswith("STATUS=degraded: tiny-int8") for line in told)
        repair()
        await until(lambda: agent.lineup.replicas[0].loaded and told[-1] == "STATUS=all models can be served")


async def test_check_refuses_what_run_would_serve_without(world: TinyWorld) -> None:
    break_rung(world, SMALL, "gone")
    with pytest.raises(ArtifactError, match=f"{SMALL}.*overspill models pull"):
        list(check_lines(world.config()))


async def test_an_on_demand_rung_is_copied_before_its_first_request_asks_for_it(world: TinyWorld) -> None:
    async with served(world.config()) as (agent, _):
        cache = world.store.parent / "cache"
        await until(lambda: any((cache / SMALL).glob("*/model.onnx")))
        assert not agent.lineup.replicas[1].loaded
