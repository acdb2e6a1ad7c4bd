"""A whole agent on a tiny model: served over real HTTP, drained, reconfigured, overrun."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest

import edge_agent.serving.local_models
from edge_agent.config import EdgeConfig
from edge_agent.daemon import EdgeAgent
from edge_agent.device.health import DeviceHealth, HealthReader
from edge_agent.fleet.effective import tellable
from edge_agent.fleet.reconcile import Knowledge, applied
from edge_agent.fleet.state import StateDir
from edge_agent.fleet.steering import Steering
from edge_agent.report import check_lines
from edge_agent.runtime.packed import PackedRuntime
from edge_agent.runtime.protocol import Logits, Runtime, RuntimeRequest, StepInput
from edge_agent.runtime.registry import open_runtime
from edge_agent.serving.lineup import ServedHere
from edge_agent.serving.replica import LocalReplica
from router.base.errors import ConfigError, OverspillError
from router.decisions.command import fetch, find
from router.decisions.explain import five_lines
from router.fleetwire.documents import DesiredConfig
from router.values.request import Locality
from tests.support.agents import served
from tests.support.ports import refused_port, taken_port
from tests.support.tiny_store import TinyWorld, build_world
from tests.support.waiting import until, until_answered

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return build_world(tmp_path_factory.mktemp("world"))


def ignoring_eos(**more: object) -> dict[str, object]:
    return {**CHAT, "ignore_eos": True, **more}


async def test_the_service_manager_is_told(world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        async with served(world.config()):
            assert await asyncio.to_thread(manager.recv, 64) == b"READY=1"
        assert await asyncio.to_thread(manager.recv, 64) == b"STOPPING=1"


async def test_it_answers_and_says_who_did(world: TinyWorld) -> None:
    async with served(world.config()) as (agent, client):
        ready = await client.get("/health/ready")
        assert ready.status_code == 200
        reply = await client.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-overspill-tier"] == "edge"
        assert reply.headers["x-overspill-model"] == "tiny-int8"
        again = await client.post("/v1/chat/completions", json=CHAT)
        assert again.json()["choices"] == reply.json()["choices"]
        listed = {card["id"] for card in (await client.get("/v1/models")).json()["data"]}
        assert {"tiny", "tiny-int8", "tiny-pruned-int8"} <= listed
        pinned = await client.post("/v1/chat/completions", json={**CHAT, "model": "tiny-pruned-int8"})
        assert pinned.headers["x-overspill-model"] == "tiny-pruned-int8"  # loaded by this request
        metrics = (await client.get("/metrics")).text
        assert 'overspill_edge_model_loaded{variant="tiny-pruned-int8"} 1.0' in metrics
        assert "overspill_edge_rss_bytes" in metrics
        assert not running_in(agent.lineup.replicas)


async def test_decisions_are_kept_on_disk_and_explained(world: TinyWorld, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with served(world.config(decisions={"path": str(path)})) as (agent, client):
        reply = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine/1"})
        assert reply.status_code == 200
        asked = await asyncio.to_thread(fetch, "mine/1", f"http://127.0.0.1:{agent.port}", "")
        metrics = await until_answered(lambda: written(client))
    assert 'overspill_decision_lines{result="dropped"} 0.0' in metrics
    read = find("mine/1", path)
    assert (read.outcome, read.tokens) == (asked.outcome, asked.tokens)
    assert read.accepted_unix_s == pytest.approx(time.time(), abs=60)
    assert [line[:5] for line in five_lines(read)] == [line[:5] for line in five_lines(asked)]
    assert b"hello" not in path.read_bytes()
    assert json.loads(path.read_text())["policy"] == agent.config.router.policy


async def written(client: httpx.AsyncClient) -> str:
    """Return the metrics once a decision is in the file."""
    text = (await client.get("/metrics")).text
    return text if 'overspill_decision_lines{result="written"} 1.0' in text else ""


async def test_a_decision_file_that_cannot_be_written_ends_the_start(world: TinyWorld, tmp_path: Path) -> None:
    config = world.config(decisions={"path": str(tmp_path / "none" / "decisions.jsonl")})
    with pytest.raises(ConfigError, match=r"decisions\.path: cannot write"):
        async with served(config):
            pass


def test_a_check_says_where_decisions_go(world: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decisions\.path: cannot write"):
        list(check_lines(world.config(decisions={"path": str(tmp_path / "none" / "decisions.jsonl")})))
    path = tmp_path / "decisions.jsonl"
    lines = list(check_lines(world.config(decisions={"path": str(path)})))
    assert f"decisions {path}, 4 files of 64 MB" in lines
    assert not list(tmp_path.iterdir()), "a check writes nothing"


async def test_bad_requests_are_told_what_is_wrong(world: TinyWorld) -> None:
    async with served(world.config()) as (_, client):
        unknown = await client.post("/v1/chat/completions", json={**CHAT, "model": "gpt-9"})
        assert unknown.status_code == 404
        long = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 5000})
        assert long.status_code == 400
        assert long.json()["error"]["code"] == "context_length_exceeded"


def running_in(replicas: Sequence[ServedHere]) -> list[object]:
    """What runs in the models of a device."""
    loops = [replica.loop for replica in replicas if isinstance(replica, LocalReplica)]
    assert len(loops) == len(replicas)
    return [one for loop in loops for one in list(loop.live)]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x" * 300},
        {"prompt": "x" * 200_000},
        {"prompt": "x", "model": "tiny-fp32"},
    ],
    ids=["too-long-here", "hopeless-here", "unknown-here"],
)
async def test_a_cloud_that_was_never_reached_makes_nothing_final(world: TinyWorld, body: dict[str, object]) -> None:
    with refused_port() as port:
        url = f"http://127.0.0.1:{port}"
        async with served(world.config(upstream={"url": url})) as (agent, client):
            await until(lambda: "ConnectError" in agent.dispatcher.unreached(Locality.ANY))
            ask = {"model": "tiny", "max_tokens": 4, **body}
            later = await client.post("/v1/completions", json=ask)
            assert later.status_code == 503, later.text
            assert "retry-after" in later.headers
            assert "the upstream: not reached yet" in later.text
            assert "ConnectError" in later.text
            assert str(port) not in later.text, "callers are not told where it is"
            final = await client.post("/v1/completions", json=ask, headers={"x-overspill-locality": "local-only"})
            assert final.status_code in {400, 404}, final.text
            for method, path in (("GET", "/v1/models/big"), ("POST", "/v2/models/big/infer")):
                assert (await client.request(method, path, json={})).status_code == 503, path
                here = {"x-overspill-locality": "local-only"}
                assert (await client.request(method, path, json={}, headers=here)).status_code == 404, path


async def test_draining_finishes_streams_and_refuses_newcomers(world: TinyWorld) -> None:
    async with served(world.config()) as (agent, client):
        body = ignoring_eos(stream=True, max_tokens=150)
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            agent.stop()
            await until(lambda: agent.phase == "draining", every_s=0.001)
            refused = await client.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert (await client.get("/health/ready")).status_code == 503
            assert (await client.get("/health/live")).status_code == 200
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
        finals = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
        assert finals[-1]["choices"][0]["finish_reason"] == "length"


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step take so long that no answer ends by itself in the test."""
    forward = PackedRuntime.forward

    def slowly(self: PackedRuntime, steps: Sequence[StepInput]) -> Logits:
        time.sleep(0.05)
        return forward(self, steps)

    monkeypatch.setattr(PackedRuntime, "forward", slowly)


@pytest.mark.parametrize("stops", [1, 2], ids=["deadline", "second-stop"])
async def test_whoever_is_cut_off_is_told_so(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stops: int
) -> None:
    slow(monkeypatch)
    drain_s = 0.1 if stops == 1 else 600.0
    config = world.config(agent={"drain_deadline_s": drain_s}, models={"context_tokens": 512, "kv_slots": 1})
    async with served(config) as (agent, client):
        body = ignoring_eos(stream=True, max_tokens=450)
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            waits = asyncio.create_task(client.post("/v1/chat/completions", json=ignoring_eos(max_tokens=450)))
            await until(lambda: agent.dispatcher.waiting)
            for _ in range(stops):
                agent.stop()
            rest = [line async for line in lines]
        told = [json.loads(line[6:])["error"]["message"] for line in rest if line.startswith('data: {"error"')]
        assert len(told) == 1, rest
        assert "shutting down" in told[0]
        refused = await waits
        assert refused.status_code == 503, refused.text
        assert "retry-after" in refused.headers
    assert "Traceback" not in caplog.text


async def test_whoever_streams_from_the_upstream_is_told_too(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow(monkeypatch)
    async with served(world.config(models={"context_tokens": 512})) as (behind, _):
        alone = {"variants": [], "preload": []}
        upstream = {"url": f"http://127.0.0.1:{behind.port}"}
        config = world.config(agent={"drain_deadline_s": 0.1}, models=alone, upstream=upstream)
        async with served(config) as (agent, client):
            await until(agent.dispatcher.known_models)
            body = ignoring_eos(stream=True, max_tokens=450)
            async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                agent.stop()
                rest = [line async for line in lines]
        assert any("shutting down" in line for line in rest if line.startswith('data: {"error"')), rest
        await until(lambda: not running_in(behind.lineup.replicas))
    assert "Traceback" not in caplog.text


@pytest.mark.slow
async def test_more_requests_than_fit_all_end_well(world: TinyWorld) -> None:
    async with served(world.config()) as (agent, client):

        async def one(number: int) -> int:
            body = ignoring_eos(stream=True, max_tokens=8, seed=number)
            async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                text = "".join([line async for line in stream.aiter_lines()])
                if stream.status_code == 200:
                    assert text.endswith("data: [DONE]")
                else:
                    assert "retry-after" in stream.headers
                return stream.status_code

        statuses = await asyncio.wait_for(asyncio.gather(*(one(n) for n in range(200))), 60)
        assert set(statuses) <= {200, 429, 503}
        assert statuses.count(200) >= 8
        assert not running_in(agent.lineup.replicas)


def desired(version: int, **tables: Any) -> DesiredConfig:
    return DesiredConfig(version=version, issued_at=datetime.now(timezone.utc), **tables)


async def test_overrides_are_applied_without_dropping_a_stream(world: TinyWorld) -> None:
    async with served(world.config()) as (agent, client):
        steering = Steering(agent)
        before = agent.lineup.replicas
        body = ignoring_eos(stream=True, max_tokens=120)
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await steering.apply(
                desired(1, models={"kv_slots": 2}, router={"overload_answer_tokens": 20, "max_queue": 5})
            )
            assert [replica.snapshot().slots for replica in agent.lineup.replicas] == [2, 2]
            assert not set(before) & set(agent.lineup.replicas)
            assert agent.dispatcher.settings.max_queue == 5
            rest = [line async for line in lines]
            assert any('"finish_reason":"length"' in line for line in rest)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        await steering.apply(desired(2))  # overrides taken away: the file's values are back
        assert [replica.snapshot().slots for replica in agent.lineup.replicas] == [4, 4]
        kept = agent.lineup.replicas
        await steering.apply(desired(3, router={"max_queue": 6}))
        assert agent.lineup.replicas == kept


def with_overrides(world: TinyWorld, folder: Path, **tables: Any) -> EdgeConfig:
    """An agent of a fleet whose broker is away, and which had `tables` in force when it ended."""
    config = world.config(fleet={"enabled": True, "port": 1, "device": "d", "state_dir": str(folder)})
    state = StateDir(config.fleet.state_path())
    state.open()
    state.save(applied(Knowledge(), desired(1, **tables)))
    state.close()
    return config


async def test_a_model_is_loaded_once_also_where_overrides_were_stored(
    world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []

    def counted(request: RuntimeRequest) -> Runtime:
        loads.append(request.slots)
        return open_runtime(request)

    monkeypatch.setattr(edge_agent.serving.local_models, "open_runtime", counted)
    config = with_overrides(world, tmp_path, models={"kv_slots": 2}, router={"max_queue": 7})
    async with served(config) as (agent, client):
        assert [replica.snapshot().slots for replica in agent.lineup.replicas] == [2, 2]
        assert agent.dispatcher.settings.max_queue == 7
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert loads == [2]


async def test_overrides_that_no_longer_apply_leave_the_file_in_force(world: TinyWorld, tmp_path: Path) -> None:
    config = with_overrides(world, tmp_path, models={"variants": ["gone"], "preload": []})
    async with served(config) as (agent, client):
        assert [replica.info.variant for replica in agent.lineup.replicas] == ["tiny-int8", "tiny-pruned-int8"]
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_lost_privacy_is_seen_in_ready_and_metrics(world: TinyWorld, tmp_path: Path) -> None:
    config = with_overrides(world, tmp_path, router={"policy": "cloud-first", "max_queue": 7})
    (config.fleet.state_path() / "privacy").write_bytes(b"")
    async with served(config) as (agent, client):
        assert agent.dispatcher.settings.policy == "local-only"
        ready = await client.get("/health/ready")
        assert ready.status_code == 200
        assert "privacy" in ready.json()["notices"][0]
        assert "overspill_edge_fleet_privacy_held 1.0" in (await client.get("/metrics")).text
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_stop_is_heard_while_stored_overrides_are_put_into_force(
    world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def endless(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Steering, "apply", endless)
    agent = EdgeAgent(with_overrides(world, tmp_path, router={"max_queue": 7}))
    running = asyncio.create_task(agent.run())
    await begun.wait()
    agent.stop()
    ended, _ = await asyncio.wait({running}, timeout=30)
    assert ended
    running.result()
    assert not agent.serving.is_set()


async def test_an_agent_whose_listener_dies_ends_with_its_error(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("no selector left")

    agent = EdgeAgent(world.config())
    running = asyncio.create_task(agent.run())
    await agent.serving.wait()
    monkeypatch.setattr(agent._listeners.http, "on_tick", fails)
    await asyncio.wait({running}, timeout=30)
    with pytest.raises(RuntimeError, match="no selector left"):
        running.result()


async def test_the_watch_over_the_device_survives_any_error(world: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    read = HealthReader.read
    looks: list[int] = []

    def broken_at_first(reader: HealthReader) -> DeviceHealth:
        looks.append(1)
        if len(looks) < 3:
            raise ZeroDivisionError("a driver's odd answer")
        return read(reader)

    monkeypatch.setattr(HealthReader, "read", broken_at_first)
    async with served(world.config(agent={"health_interval_s": 0.2})) as (agent, _):
        await until(lambda: agent.health is not None)


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"models": {"variants": ["tiny-int8", "nothing"], "preload": []}}, "model"),
        ({"models": {"variants": ["tiny-fp32"], "preload": []}}, "models.variants"),
        ({"models": {"slots": 3}}, "models.slots"),
        ({"router": {"policy": "nonsense"}}, "router"),
    ],
)
async def test_what_cannot_be_applied_changes_nothing(world: TinyWorld, tables: dict[str, object], key: str) -> None:
    async with served(world.config()) as (agent, client):
        before = (agent.config, agent.lineup.replicas, agent.dispatcher.settings)
        with pytest.raises(ConfigError) as raised:
            await Steering(agent).apply(desired(1, **tables))
        assert key in (raised.value.param or "") or key in raised.value.message
        assert (agent.config, agent.lineup.replicas, agent.dispatcher.settings) == before
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_the_fleet_sees_the_agent_without_its_secrets(world: TinyWorld) -> None:
    config = world.config(gateway={"api_keys": ["top-secret-0123456789"]}, upstream={"api_key": "hush"})
    async with served(config) as (agent, client):
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 401
        steering = Steering(agent)
        described = steering.describe()
        assert [(model.variant, model.state) for model in described.models] == [
            ("tiny-int8", "loaded"),
            ("tiny-pruned-int8", "on-demand"),
        ]
        assert "top-secret" not in json.dumps(tellable(config))
        assert "hush" not in json.dumps(described.effective)
        snapshot = steering.snapshot()
        assert snapshot.load == 0
        assert (snapshot.memory_rss_bytes or 0) > 1e6


async def test_a_taken_port_and_an_unknown_variant_end_the_start(world: TinyWorld) -> None:
    with taken_port() as port, pytest.raises(ConfigError, match="another process has it"):
        await EdgeAgent(world.config(gateway={"port": port})).run()
    with pytest.raises(OverspillError, match="nothing"):
        await EdgeAgent(world.config(models={"variants": ["nothing"], "preload": []})).run()


async def test_a_check_beside_the_agent_that_runs_looks_at_everything(world: TinyWorld) -> None:
    async with served(world.config()) as (agent, _):
        config = world.config(gateway={"port": agent.port})
        lines = await asyncio.to_thread(lambda: list(check_lines(config)))
        (warning,) = [line for line in lines if line.startswith("warning")]
        assert f"an agent runs at 127.0.0.1:{agent.port} already" in warning
        assert any(line.startswith("model     tiny-int8") for line in lines)
        assert lines[-1] == "ok"
        broken = world.config(gateway={"port": agent.port}, models={"variants": ["nothing"], "preload": []})
        with pytest.raises(OverspillError, match="nothing"):
            await asyncio.to_thread(lambda: list(check_lines(broken)))


async def test_a_store_without_models_leaves_an_agent_that_says_how_to_fill_it(
    world: TinyWorld, tmp_path: Path
) -> None:
    async with served(world.config(models={"store": str(tmp_path)})) as (_, client):
        ready = await client.get("/health/ready")
        assert ready.status_code == 503
        assert "overspill models pull" in ready.text


async def test_an_agent_without_models_is_a_router(world: TinyWorld) -> None:
    config = world.config(models={"variants": [], "preload": []})
    async with served(config) as (_, client):
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        assert "no model is served here" in ready.text
        assert (await client.get("/health/live")).status_code == 200
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code in (404, 503)
        assert refused.json()["error"]["message"]


PROBES = ("/health/ready", "/health", "/ping", "/v2/health/ready")


async def probed(client: httpx.AsyncClient) -> set[int]:
    """What every page of readiness says."""
    return {(await client.get(path)).status_code for path in PROBES}


async def test_where_a_cloud_is_that_is_away_is_told_to_operators_alone(world: TinyWorld, tmp_path: Path) -> None:
    """Neither before it was reached, nor where requests fail or its breaker is open, are strangers told its address."""
    with refused_port() as never:
        config = world.config(
            models={"variants": [], "preload": []},
            upstream={"url": f"http://127.0.0.1:{never}", "poll_interval_s": 0.1},
        )
        async with served(config) as (agent, client):
            await until(lambda: "ConnectError" in agent.dispatcher.unreached(Locality.ANY))
            told = [(await client.get(path)).text for path in PROBES]
            told.append((await client.post("/v1/chat/completions", json=CHAT)).text)
            assert all("127.0.0.1" not in text and str(never) not in text for text in told), told
            assert "the upstream: not reached yet" in told[0]
            (row,) = (await client.get("/v1/status")).json()["router"]["unreached"]
            assert row.startswith(f"the upstream at http://127.0.0.1:{never}: ")
    async with contextlib.AsyncExitStack() as stack:
        behind, _ = await stack.enter_async_context(served(build_world(tmp_path / "behind").config()))
        upstream = {"url": f"http://127.0.0.1:{behind.port}", "poll_interval_s": 60.0}
        async with served(world.config(models={"variants": [], "preload": []}, upstream=upstream)) as (agent, client):
            await until(lambda: agent.ready()[0])
            await stack.aclose()  # its probes do not notice for a minute
            refused = [await client.post("/v1/chat/completions", json=CHAT) for _ in range(5)]
            assert {reply.status_code for reply in refused} <= {502, 503}
            assert all("127.0.0.1" not in reply.text and str(behind.port) not in reply.text for reply in refused)


async def test_an_agent_without_models_is_ready_while_its_upstream_is(world: TinyWorld, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        behind, _ = await stack.enter_async_context(served(build_world(tmp_path / "behind").config()))
        upstream = {"url": f"http://127.0.0.1:{behind.port}", "poll_interval_s": 0.1}
        config = world.config(models={"variants": [], "preload": []}, upstream=upstream)
        async with served(config) as (agent, client):
            await until(lambda: agent.ready()[0])
            assert await probed(client) == {200}
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            await stack.aclose()  # the upstream goes away
            await until(lambda: "unreachable" in agent.ready()[1])
            assert await probed(client) == {503}
            told = await client.get("/health/ready")
            assert int(told.headers["retry-after"]) >= 1
            assert "unreachable" in told.json()["error"]["message"]
            assert "tiny" not in told.text, "names of models are for callers"
            assert (await client.get("/health/live")).status_code == 200
            status = (await client.get("/v1/status")).json()
            assert (status["ready"], "unreachable" in status["why"]) == (False, True)
            refused = await client.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)


async def test_an_agent_with_a_model_is_ready_whatever_its_upstream_does(world: TinyWorld) -> None:
    with refused_port() as port:
        async with served(world.config(upstream={"url": f"http://127.0.0.1:{port}"})) as (agent, client):
            await until(lambda: "ConnectError" in agent.dispatcher.unreached(Locality.ANY))
            assert await probed(client) == {200}
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_what_the_policy_keeps_out_makes_nobody_ready(world: TinyWorld, tmp_path: Path) -> None:
    async with served(build_world(tmp_path / "behind").config()) as (behind, _):
        config = world.config(
            models={"variants": [], "preload": []},
            upstream={"url": f"http://127.0.0.1:{behind.port}"},
            router={"policy": "local-only"},
        )
        async with served(config) as (agent, client):
            await until(agent.infos)
            told = await client.get("/health/ready")
            assert (told.status_code, "the policy `local-only`" in told.text) == (503, True)


@pytest.mark.process
def test_the_daemon_imports_neither_torch_nor_a_runtime() -> None:
    code = "import sys, edge_agent.daemon; print([m for m in ('torch', 'onnxruntime', 'onnx') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


async def test_rungs_are_loaded_and_unloaded_while_others_answer(world: TinyWorld) -> None:
    async with served(world.config()) as (agent, client):
        stream = {**ignoring_eos(max_tokens=200, stream=True), "model": "tiny-int8"}
        async with client.stream("POST", "/v1/chat/completions", json=stream) as running:
            lines = running.aiter_lines()
            await anext(lines)
            gone = await client.post("/v2/repository/models/tiny-int8/unload")
            assert gone.status_code == 200, gone.text
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]", "an answer under way ends as it should"
        index = (await client.post("/v2/repository/index")).json()
        states = {e["name"]: e["state"] for e in index}
        assert states == {"tiny": "READY", "tiny-pruned-int8": "READY", "tiny-int8": "UNAVAILABLE"}
        assert (await client.post("/v1/chat/completions", json={**CHAT, "model": "tiny-int8"})).status_code == 404
        other = await client.post("/v1/chat/completions", json=CHAT)
        assert other.headers["x-overspill-model"] == "tiny-pruned-int8"
        await agent.reconfigure(agent.config)  # what the fleet sends does not undo it
        assert [replica.info.variant for replica in agent.lineup.replicas] == ["tiny-pruned-int8"]
        assert (await client.post("/v2/repository/models/tiny/load")).status_code == 200
        assert all(replica.loaded for replica in agent.lineup.replicas)
        assert (await client.post("/v1/chat/completions", json={**CHAT, "model": "tiny-int8"})).status_code == 200
        for name, status in (("nothing", 404), ("tiny-fp32", 400)):
            refused = await client.post(f"/v2/repository/models/{name}/load")
            assert refused.status_code == status, refused.text
        assert (await client.post("/v2/repository/models/nothing/unload")).status_code == 404
