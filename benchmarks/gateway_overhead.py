"""What gateway and router cost: processor time for one request, and for each streamed token on top.

python -m benchmarks.gateway_overhead [--json FILE] [--requests N]

The real gateway and the real dispatcher, called as an ASGI server calls them, around a replica that answers at once. So
the HTTP server, the tokenizer and the model are left out, and everything that Overspill adds to them is in: decoding,
admission, prediction, policy, the decision record, metrics, the log line, encoding each event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncGenerator, MutableMapping
from pathlib import Path
from typing import Any

import uvloop

from router.base import logs
from router.base.clock import MonotonicClock
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.telemetry import Telemetry
from router.gateway.app import create_app
from router.gateway.deps import GatewayDeps
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import FinishReason, InferenceRequest, Prompt, TokenChunk
from router.values.settings import RouterSettings

MODEL = "smollm2-135m"
TOKENS = (1, 65, 257)
ROUNDS = 5


class Instant:
    """A replica that has every token ready."""

    link = None

    def __init__(self) -> None:
        self.info = ReplicaInfo(
            replica_id="local/instant",
            endpoint="local",
            tier="edge",
            remote=False,
            family=MODEL,
            variant=f"{MODEL}-instant",
            rung=0,
            quality=1.0,
            context_tokens=8192,
            prior=SpeedPrior(1000.0, 60.0),
        )

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.info, True, 8)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        tokens = request.sampling.max_tokens or 1
        for _ in range(tokens - 1):
            yield TokenChunk(" word", 1)
        yield TokenChunk(" end", 1, finish_reason=FinishReason.LENGTH, prompt_tokens=request.prompt_tokens)


class Counted:
    """A tokenizer that costs nothing."""

    def count(self, model: str, prompt: Prompt) -> int:  # noqa: ARG002
        return 40


async def call(app: Any, tokens: int) -> int:
    """Send one streamed chat through the application; returns the events that came back."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "stream": True,
            "max_tokens": tokens,
        }
    ).encode()
    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 40000),
        "server": ("127.0.0.1", 8600),
    }
    unsent = [{"type": "http.request", "body": body, "more_body": False}]
    events = 0

    async def receive() -> MutableMapping[str, Any]:
        if unsent:
            return unsent.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal events
        events += message.get("body", b"").count(b"data: ")

    await app(scope, receive, send)
    return events


async def measure(requests: int) -> list[dict[str, object]]:
    """Return the median processor time of a request for each answer length."""
    clock, telemetry, replica = MonotonicClock(), Telemetry(), Instant()
    async with Dispatcher([replica], RouterSettings(), clock=clock, telemetry=telemetry) as dispatcher:
        app = create_app(
            GatewayDeps(
                dispatcher=dispatcher,
                prompts=Counted(),
                tier="edge",
                telemetry=telemetry,
                clock=clock,
                models=lambda: [replica.info],
            )
        )
        rows: list[dict[str, object]] = []
        for tokens in TOKENS:
            events = await call(app, tokens)
            assert events >= tokens, f"{events} events for {tokens} tokens"
            rounds = []
            for _ in range(ROUNDS):
                began_s = time.process_time()
                for _ in range(requests):
                    await call(app, tokens)
                rounds.append((time.process_time() - began_s) / requests * 1e6)
            rows.append({"tokens": tokens, "request_us": round(statistics.median(rounds), 1)})
    return rows


def main() -> None:
    """Print the table, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=300)
    arguments = parser.parse_args()
    logs.configure("info", "json", fd=os.open(os.devnull, os.O_WRONLY))  # one line a request, as in production
    rows = uvloop.run(measure(arguments.requests))
    first, last = rows[0], rows[-1]
    token_us = (last["request_us"] - first["request_us"]) / (last["tokens"] - first["tokens"])  # type: ignore[operator]
    print(f"{'streamed tokens':>16}{'CPU µs a request':>19}")
    for row in rows:
        print(f"{row['tokens']:>16}{row['request_us']:>19}")
    print(f"a token: {token_us:.1f} µs")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": rows, "token_us": round(token_us, 2)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
