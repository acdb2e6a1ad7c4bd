"""A tier with jobs on a free port of this event loop, around a real dispatcher and a replica that echoes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai
import uvicorn

from router.base.clock import MonotonicClock
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.telemetry import Telemetry
from router.gateway.app import create_app
from router.gateway.jobs.calls import Calls
from router.jobs.calendar import Calendar
from router.jobs.jobs import Jobs
from router.jobs.settings import JobsSettings
from router.values.chunk import FinishReason, TokenChunk
from router.values.replica import Replica, ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest
from tests.support.gateway_fakes import gateway_deps, prompt_text, replica_info
from tests.support.patience import unhurried
from tests.support.tiers import Quiet
from tests.support.waiting import PATIENCE_S, until, until_answered

SETTINGS = JobsSettings(min_free_mbytes=0)
CLOCK = MonotonicClock()


class Echo:
    """A replica that says the prompt back; `gate` holds it up while it is clear, `holds_at` at one prompt."""

    def __init__(self, info: ReplicaInfo | None = None, slots: int = 8, holds_at: str = "") -> None:
        self.info = info or replica_info("tiny-fp32", 0)
        self.link = None
        self.available = True
        self.slots = slots
        self.holds_at = holds_at
        self.asked: list[str] = []
        self.requests: list[InferenceRequest] = []
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def snapshot(self) -> ReplicaSnapshot:
        why = "" if self.available else "off"
        return ReplicaSnapshot(self.info, available=self.available, slots=self.slots, running=self.running, why=why)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        text = prompt_text(request.prompt)
        self.asked.append(text)
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
            if text == self.holds_at:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            yield TokenChunk(text)
            yield TokenChunk("", 0, finish_reason=FinishReason.STOP)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


class JobTier:
    """`async with`; `killed` leaves it as a crash would: nothing more is written, nothing is tidied up."""

    def __init__(
        self,
        folder: Path,
        replica: Replica,
        settings: JobsSettings = SETTINGS,
        calendar: Calendar | None = None,
        **deps,
    ) -> None:
        self.telemetry = Telemetry()
        self.dispatcher = Dispatcher([replica], unhurried(), clock=CLOCK, telemetry=self.telemetry)
        self.jobs = Jobs(
            msgspec.structs.replace(settings, dir=str(folder)),
            CLOCK,
            self.dispatcher,
            webhook_secret=settings.webhook_secret,
            calendar=calendar,
        )
        self.deps = gateway_deps(
            self.dispatcher,
            telemetry=self.telemetry,
            clock=CLOCK,
            models=lambda: [replica.info],
            jobs=self.jobs,
            **deps,
        )

    async def __aenter__(self) -> JobTier:
        self._stack = contextlib.AsyncExitStack()
        app = create_app(self.deps)
        await self._stack.enter_async_context(self.dispatcher)
        await self._stack.enter_async_context(self.jobs)
        await self.jobs.serve(Calls(app.api.router, self.deps.tenancy.directory))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self._server = Quiet(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        await until(lambda: self._server.started)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.should_exit = True
        await self._serving
        self._socket.close()
        await self._stack.aclose()

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


@contextlib.asynccontextmanager
async def job_tier(
    folder: Path, replica: Replica | None = None, **more
) -> AsyncIterator[tuple[JobTier, openai.AsyncOpenAI]]:
    """A running tier and the real SDK on it."""
    async with JobTier(folder, replica or Echo(), **more) as tier, tier.client() as client:
        yield tier, client


def line(custom_id: str, text: str, **changes) -> dict:
    """One request of a batch."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    given = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {**given, **changes}


def as_file(lines: Sequence[dict | bytes]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict]:
    """Read a file that a batch has made."""
    assert file_id is not None, "there is no such file"
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


async def ended(client: openai.AsyncOpenAI, batch_id: str, timeout_s: float = PATIENCE_S) -> openai.types.Batch:
    """Wait until a batch has ended."""

    async def look() -> openai.types.Batch | None:
        batch = await client.batches.retrieve(batch_id)
        return batch if batch.status in {"completed", "failed", "expired", "cancelled"} else None

    return await until_answered(look, timeout_s, every_s=0.02)


async def submit(client: openai.AsyncOpenAI, lines: Sequence[dict | bytes], window: Any = "24h", **more):
    """Upload lines and make a batch of them."""
    file = await client.files.create(file=("lines.jsonl", as_file(lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window=window, **more
    )
