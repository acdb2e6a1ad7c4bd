"""Random methods, paths, headers, keys and bodies on a tier with tenants: nothing crashes, and nobody sees another.

Each tenant has a mark: the replica says it in every answer, and its request ids and prompts hold it. No reply to
anybody else may hold it. A model that one tenant alone may use is named to nobody else. Who has no key learns nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.tenants.house import Words
from router.base import logs
from router.base.clock import MonotonicClock
from router.cache.exact import AnswerCache
from router.cache.settings import CacheSettings
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.telemetry import Telemetry
from router.gateway.app import create_app
from router.gateway.auth import OPEN_PATHS
from router.gateway.deps import GatewayDeps
from router.tenants.keys_file import digest_of
from router.tenants.tenancy import KeySources, Tenancy
from router.tenants.tenant import Tenant
from router.values.chunk import FinishReason, TokenChunk
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest
from router.values.settings import RouterSettings

SECRET_MODEL = "secret-model-of-red"  # noqa: S105 - a name
MARKS = {"red": "vermilion", "green": "viridian", "blue": "ultramarine"}
KEYS = {name: f"key-of-{name}-0123456789abcdef" for name in MARKS}
_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/tiny",
    "/v1/models/secret-model-of-red",
    "/v2",
    "/v2/health/ready",
    "/v2/models/tiny",
    "/v2/models/secret-model-of-red",
    "/v2/models/tiny/infer",
    "/v2/models/stats",
    "/v2/models/secret-model-of-red/infer",
    "/v2/models/tiny/generate",
    "/v1/status",
    "/v1/scale",
    "/metrics",
    "/v1/usage",
    "/health/ready",
    "/version",
    "/openapi.json",
    "/docs",
    "/ping",
    "/",
    "/v1",
    "/v1/files",
    "/v1/batches",
    "/v1/responses",
    "/tokenize",
)
_HEADERS = (
    "x-overspill-priority",
    "x-overspill-locality",
    "x-overspill-deadline-ms",
    "x-overspill-ttft-slo-ms",
    "x-overspill-session",
    "x-overspill-cache-salt",
    "x-overspill-cache",
    "x-overspill-instance",
    "x-overspill-demand",
    "x-overspill-hops",
    "x-request-id",
    "x-stainless-retry-count",
    "idempotency-key",
    "client-cert",
    "x-forwarded-client-cert",
    "x-forwarded-for",
    "accept",
    "accept-encoding",
    "content-type",
    "content-length",
    "content-encoding",
    "origin",
    "cookie",
    "traceparent",
    "authorization",
    "x-api-key",
    "x-overspill-secret",
)
_VALUES = (
    "",
    "0",
    "1",
    "-1",
    "hit",
    "local-only",
    "any",
    "gzip",
    "application/json",
    "*/*",
    "é",
    "x" * 300,
    "a b",
    "\t",
    "1e9",
)


class Says:
    """A replica that says whose request it answers."""

    link = None

    def __init__(self, variant: str, names: dict[str, str]) -> None:
        prior = SpeedPrior(900.0, 60.0, 0.1, "test")
        self.info = ReplicaInfo(
            replica_id=f"local/{variant}",
            endpoint="local",
            tier="cloud",
            remote=False,
            family=variant,
            variant=variant,
            rung=0,
            quality=1.0,
            context_tokens=4096,
            prior=prior,
        )
        self._names = names

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.info, available=True, slots=64)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(f"I answer {MARKS[self._names[request.caller]]}")
        yield TokenChunk("", 0, FinishReason.STOP)


@dataclass
class Found:
    """What came of it.

    Attributes:
        faults: what must never happen, with what was sent.
    """

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    answers: int = 0
    hits: int = 0
    faults: list[str] = field(default_factory=list)


@logs.at_least(logging.CRITICAL)
def run(requests: int, seed: int) -> dict[str, object]:
    """Send them; returns what came back by status, and every fault."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys"
        path.write_text(keys_file())
        found = asyncio.run(_send_all(requests, seed, path))
    return {
        "requests": found.sent,
        "seed": seed,
        "statuses": {str(status): count for status, count in sorted(found.statuses.items())},
        "answers": found.answers,
        "from_the_cache": found.hits,
        "faults": found.faults[:20],
        "took_s": round(time.monotonic() - began_s, 1),
    }


def keys_file() -> str:
    """Three tenants; one alone may use the secret model."""
    limits = [f"tenant {name} models=tiny" for name in KEYS if name != "red"]
    return "\n".join([*limits, *(f"key {name} sha256:{digest_of(key.encode())}" for name, key in KEYS.items())])


async def _send_all(requests: int, seed: int, path: Path) -> Found:
    known = KeySources(path=path).directory()
    names = {Tenant.named(name).digest: name for name in KEYS}
    clock, telemetry = MonotonicClock(), Telemetry()
    replicas = [Says("tiny", names), Says(SECRET_MODEL, names)]
    found = Found()
    async with Dispatcher(replicas, RouterSettings(), clock=clock, telemetry=telemetry, seed=seed) as dispatcher:
        deps = GatewayDeps(
            dispatcher=dispatcher,
            prompts=Words(),
            tier="cloud",
            telemetry=telemetry,
            clock=clock,
            models=lambda: [replica.info for replica in replicas],
            tenancy=Tenancy(known, clock),
            cache=AnswerCache(CacheSettings(max_mbytes=1), clock, lambda: [replica.info for replica in replicas]),
            scale=lambda model: {} if model is None else None,
        )
        transport = httpx.ASGITransport(create_app(deps), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://tier", timeout=60) as http:
            draw, left = random.Random(seed), iter(range(requests))  # noqa: S311
            await asyncio.gather(*(_worker(http, draw, left, found) for _ in range(16)))
    return found


async def _worker(http: httpx.AsyncClient, draw: random.Random, left: object, found: Found) -> None:
    for _ in left:  # type: ignore[attr-defined]
        who = draw.choice([*KEYS, *KEYS, "", "stranger"])
        method, path, headers, body = _drawn(draw, who)
        request = http.build_request(method, path, headers=headers, content=body)
        reply = await http.send(request)
        found.sent += 1
        found.statuses[reply.status_code] += 1
        found.answers += "I answer" in reply.text
        found.hits += reply.headers.get("x-overspill-cache") == "hit"
        told = reply.text + repr(sorted(reply.headers.items()))
        sent = f"{who or 'nobody'}: {method} {path} {headers} {body[:200]!r} -> {reply.status_code}"
        if reply.status_code >= 500 and reply.status_code != 503:
            found.faults.append(f"crashed: {sent} {reply.text[:200]}")
        foreign = [mark for name, mark in MARKS.items() if name != who and mark in told]
        echoed = [mark for mark in foreign if mark in path or mark in repr(headers) or mark in repr(body)]
        if set(foreign) - set(echoed):
            found.faults.append(f"told of another: {sent} {told[:300]}")
        if who != "red" and SECRET_MODEL in told and SECRET_MODEL not in path and SECRET_MODEL not in repr(body):
            found.faults.append(f"told of the model: {sent} {told[:300]}")
        if who not in KEYS and reply.status_code < 300 and path.split("?")[0].rstrip("/") not in OPEN_PATHS:
            found.faults.append(f"let in: {sent}")


def _drawn(draw: random.Random, who: str) -> tuple[str, str, list[tuple[bytes, bytes]], bytes]:
    """Draw a request: half of them such as clients send, the others anything."""
    mark = MARKS.get(who, "nobody")
    headers: list[tuple[str, str]] = []
    if who in KEYS:
        headers.append(("authorization", f"Bearer {KEYS[who]}"))
    elif who:
        wrong = draw.choice(
            [KEYS["red"][:-1], KEYS["red"] + "0", KEYS["red"].upper(), digest_of(KEYS["red"].encode()), "é"]
        )
        headers.append(("authorization", draw.choice(["Bearer ", "bearer  ", "Basic ", ""]) + wrong))
    headers.append(("x-request-id", f"{mark}-{draw.randrange(50)}"))
    model = draw.choice(["tiny", "tiny", "tiny", SECRET_MODEL, "none"])
    prompt = draw.choice([f"say {mark}", "say what others say", ""])
    if draw.random() < 0.5:
        path = draw.choice(["/v1/chat/completions", "/v1/completions", f"/v2/models/{model}/infer"])
        headers.append(("content-type", "application/json"))
        return "POST", path, _raw(headers), _body(draw, path, model, prompt)
    path = draw.choice([*_PATHS, *(f"/v1/decisions/{other}-{draw.randrange(50)}" for other in MARKS.values())])
    if draw.random() < 0.3:
        path += draw.choice(["/", "?x=1", "%2e%2e/", "?since=2026-11-01", "?tenant=red", "/../metrics", ";a", "%00"])
    values = [*_VALUES, "x" * 300, KEYS["red"] + "x", mark]
    headers += [(draw.choice(_HEADERS), draw.choice(values)) for _ in range(draw.randrange(5))]
    method = draw.choice(["GET", "GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW"])
    body = draw.choice([b"", b"{}", b"null", b"\xff" * 10, _body(draw, path, model, prompt), b"[" * 500])
    return method, path, _raw(headers), body


def _raw(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _body(draw: random.Random, path: str, model: str, prompt: str) -> bytes:
    if path.startswith("/v2"):
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [prompt]}
        return json.dumps({"inputs": [tensor], "parameters": {"temperature": 0}}).encode()
    body: dict[str, object] = {
        "model": model,
        "temperature": draw.choice([0, 1, "hot"]),
        "max_tokens": draw.choice([1, 8, -1]),
    }
    if draw.random() < 0.2:
        body["stream"] = True
    if "chat" in path:
        return json.dumps({**body, "messages": [{"role": "user", "content": prompt}]}).encode()
    return json.dumps({**body, "prompt": prompt}).encode()
