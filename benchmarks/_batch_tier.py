"""A cloud tier by its command that keeps batches, over a stub engine or SmolLM2, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from examples.demo.processes import Child, free_port, overspill

REAL = "smollm2-135m-fp32"
_START_S = 120.0
_POLL_S = 0.2
_CONFIG = """\
[server]
port = {port}
warm_up = true

[jobs]
dir = "{folder}/jobs"
min_free_mbytes = 0
"""
_STUB = """
[[backends]]
name = "stub"
urls = ["{url}"]
[[backends.models]]
served = "stub"
slots = 16
"""


@dataclass(frozen=True)
class Kind:
    """What answers, and how much is asked of it.

    Attributes:
        lines: of the batch during which the tier is killed; filler: of one that runs beside online requests.
        rate: online requests a second within a burst.
        holds_up: lines are held up for these, rather than stopped.
    """

    name: str
    model: str
    lines: int
    filler: int
    rate: float
    max_tokens: int
    holds_up: bool = False


class Tier:
    """A cloud tier by its command, and a client of it."""

    def __init__(self, folder: Path, kind: Kind, stub_url: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.kind = kind
        config = folder / "cloud.toml"
        text = _CONFIG.format(port=self.port, folder=folder)
        config.write_text(text + (_STUB.format(url=stub_url) if stub_url else ""))
        more = () if stub_url else ("--model", REAL)
        self.child = Child("cloud", overspill("cloud", "serve", "--config", str(config), *more), folder / "cloud.log")

    async def start(self, http: aiohttp.ClientSession) -> None:
        self.child.start()
        ends_s = time.monotonic() + _START_S
        while time.monotonic() < ends_s:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{self.url}/health/ready") as ready, http.get(f"{self.url}/v1/models") as models:
                    if ready.status == models.status == 200 and (await models.json())["data"]:
                        return
            await asyncio.sleep(_POLL_S)
        raise RuntimeError(f"the tier did not start: {self.child.log.read_text()[-2000:]}")

    def line(self, number: int, tag: str) -> dict[str, Any]:
        return {
            "custom_id": f"{tag}-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": chat(self.kind, f"{tag} line {number} says something short"),
        }

    async def submit(self, http: aiohttp.ClientSession, lines: int, tag: str) -> str:
        form = aiohttp.FormData({"purpose": "batch"})
        text = "\n".join(json.dumps(self.line(number, tag)) for number in range(lines))
        form.add_field("file", io.BytesIO(text.encode()), filename="lines.jsonl")
        async with http.post(f"{self.url}/v1/files", data=form) as reply:
            file = await reply.json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        async with http.post(f"{self.url}/v1/batches", json=asked) as reply:
            return str((await reply.json())["id"])

    async def batch(self, http: aiohttp.ClientSession, batch_id: str) -> dict[str, Any]:
        async with http.get(f"{self.url}/v1/batches/{batch_id}") as reply:
            found: dict[str, Any] = await reply.json()
            return found

    async def wait(self, http: aiohttp.ClientSession, batch_id: str, answered: int | None) -> dict[str, Any]:
        """Wait until so many lines are answered; None: until it has ended."""
        while True:
            batch = await self.batch(http, batch_id)
            counts = batch["request_counts"]
            if batch["status"] in {"completed", "failed", "expired", "cancelled"}:
                return batch
            if answered is not None and counts["completed"] + counts["failed"] >= answered:
                return batch
            await asyncio.sleep(_POLL_S)

    async def cancel(self, http: aiohttp.ClientSession, batch_id: str) -> dict[str, Any]:
        async with http.post(f"{self.url}/v1/batches/{batch_id}/cancel") as reply:
            await reply.read()
        return await self.wait(http, batch_id, None)


def chat(kind: Kind, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": kind.model, "messages": messages, "max_tokens": kind.max_tokens, "temperature": 0}
