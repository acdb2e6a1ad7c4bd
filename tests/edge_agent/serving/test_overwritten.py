"""A real agent whose model files are overwritten, cut short and removed beside it, while it streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.paths import REPOSITORY
from tests.support.waiting import until_answered

pytestmark = pytest.mark.real_model

VARIANT = "smollm2-135m-int8"
CHAT = {
    "model": VARIANT,
    "messages": [{"role": "user", "content": "Write three sentences about the sea and the land."}],
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture
def store(models_root: Path, tmp_path: Path) -> Path:
    """A store of its own, to be damaged."""
    shutil.copytree(
        models_root / "smollm2-135m" / VARIANT, tmp_path / "store" / "smollm2-135m" / VARIANT, symlinks=False
    )
    return tmp_path / "store"


@asynccontextmanager
async def agent(store: Path, port: int, until_it_says: str) -> AsyncIterator[httpx.AsyncClient]:
    """A running agent, as soon as its readiness says the given words; it must live to the end of the block."""
    config = store.parent / "edge.toml"
    config.write_text(
        f'[agent]\nprofile = "generic-x86-cpu"\ncache_dir = "{store.parent / "cache"}"\n[gateway]\nport = {port}\n'
        f'[models]\nstore = "{store}"\nvariants = ["{VARIANT}"]\npreload = ["{VARIANT}"]\nintra_op_threads = 1\n'
    )
    with (store.parent / "agent.log").open("wb") as said:
        command = (sys.executable, "-m", "overspill", "edge", "run", "--config", str(config))
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=said,
            stderr=said,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            async def says_it() -> bool:
                assert process.returncode is None, (store.parent / "agent.log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    return until_it_says in (await client.get("/health/ready")).text
                return False

            await until_answered(says_it, 90, every_s=0.1)
            yield client
        assert process.returncode is None
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def answer(client: httpx.AsyncClient) -> str:
    reply = await client.post("/v1/chat/completions", json=CHAT)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def _garbage(file: Path) -> None:
    with file.open("r+b") as writer:  # in place: the same inode, as `cp` and `rsync --inplace` do
        size = file.stat().st_size
        while writer.tell() < size:
            writer.write(os.urandom(1 << 20)[: size - writer.tell()])
        writer.flush()
        os.fsync(writer.fileno())


DAMAGES = {"overwritten": _garbage, "truncated": lambda file: os.truncate(file, 4096)}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_an_artifact_changed_in_place_while_it_streams_is_served_on_as_it_was(
    store: Path, free_port: int, damage: str
) -> None:
    weights = store / "smollm2-135m" / VARIANT / "model.onnx.data"
    async with agent(store, free_port, '"ready"') as client:
        expected = await answer(client)
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            lines = stream.aiter_lines()
            begun = [await anext(lines)]
            DAMAGES[damage](weights)
            rest = [line async for line in lines]
        parts = [json.loads(line[6:]) for line in (*begun, *rest) if line.startswith("data: {")]
        assert (
            "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"]) == expected
        )
        await asyncio.sleep(1.0)  # the idle agent gives the mapped pages back: from now on they are read from disk
        assert await answer(client) == expected

        async def noticed() -> bool:
            return f'overspill_edge_artifact_changed{{variant="{VARIANT}"}} 1.0' in (await client.get("/metrics")).text

        await until_answered(noticed, every_s=0.1)
        assert (await client.get("/health/ready")).status_code == 200
        assert "artifact changed" in (store.parent / "agent.log").read_text()
    if damage == "truncated":
        return  # known by its size; what only digests tell is the harder case
    async with agent(store, free_port, "no model can be served") as client:
        ready = await client.get("/health/ready")
        assert ready.status_code == 503  # a new life refuses what is no longer what the manifest says
        assert "model.onnx.data" in ready.text
