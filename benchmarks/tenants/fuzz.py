"""Random methods, paths, headers, keys and bodies on a tier with tenants: nothing crashes, and nobody sees another.

Each tenant has a mark: the replica says it in every answer, and its request ids, prompts, files and batches hold it. No
reply to anybody else may hold it, nor open another's file, batch or deferred request; the operator sees what operators
see, and reads nobody's files. A model that one tenant alone may use is named to no other. Who has no key learns
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.tenants.drawn import Drawing, Drawn
from benchmarks.tenants.surface import KEYS, MARKS, OPERATOR, SECRET_MODEL, surface
from router.base import logs
from router.gateway.auth import OPEN_PATHS

_NAMES = re.compile(r'"id":"((?:file-|batch_|deferred_)[0-9a-z]+)"')
_OPERATORS = ("/v1/decisions/", "/v1/status", "/v1/usage", "/v1/batches", "/metrics")


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
    jobs: int = 0
    faults: list[str] = field(default_factory=list)


@logs.at_least(logging.CRITICAL)
def run(requests: int, seed: int) -> dict[str, object]:
    """Send them; returns what came back by status, and every fault."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_send_all(requests, seed, Path(folder)))
    return {
        "requests": found.sent,
        "seed": seed,
        "statuses": {str(status): count for status, count in sorted(found.statuses.items())},
        "answers": found.answers,
        "from_the_cache": found.hits,
        "files_batches_deferred": found.jobs,
        "faults": found.faults[:20],
        "took_s": round(time.monotonic() - began_s, 1),
    }


async def _send_all(requests: int, seed: int, folder: Path) -> Found:
    found = Found()
    async with surface(folder, seed) as http:
        drawing, left = Drawing(random.Random(seed)), iter(range(requests))  # noqa: S311
        await asyncio.gather(*(_worker(http, drawing, left, found) for _ in range(16)))
    return found


async def _worker(http: httpx.AsyncClient, drawing: Drawing, left: object, found: Found) -> None:
    for _ in left:  # type: ignore[attr-defined]
        drawn = drawing.request()
        request = http.build_request(drawn.method, drawn.path, headers=drawn.headers, content=drawn.body)
        reply = await http.send(request)
        found.sent += 1
        found.statuses[reply.status_code] += 1
        found.answers += "I answer" in reply.text
        found.hits += reply.headers.get("x-overspill-cache") == "hit"
        sent = f"{drawn} -> {reply.status_code} {reply.text[:300]}"
        found.faults += [f"{fault}: {sent}" for fault in _faults(drawing, drawn, reply)]
        if reply.status_code < 300 and drawn.method == "POST" and drawn.who in KEYS:
            names = [name for name in _NAMES.findall(reply.text) if drawing.owner(name) is None]
            drawing.learn(drawn.who, names)
            found.jobs += len(names)


def _faults(drawing: Drawing, drawn: Drawn, reply: httpx.Response) -> list[str]:
    """What must not be, in a few words each."""
    faults, who, path = [], drawn.who, drawn.path.split("?")[0]
    told, fine = reply.text + repr(sorted(reply.headers.items())), reply.status_code < 300
    sees_all = who == OPERATOR and path.startswith(_OPERATORS)
    if reply.status_code >= 500 and reply.status_code != 503:
        faults.append("crashed")
    foreign = [mark for name, mark in MARKS.items() if name != who and mark in told]
    if not sees_all and not all(drawn.says(mark) for mark in foreign):
        faults.append("told of another")
    if who not in {"red", OPERATOR} and SECRET_MODEL in told and not drawn.says(SECRET_MODEL):
        faults.append("told of the model")
    if fine and who not in KEYS and path.rstrip("/") not in OPEN_PATHS:
        faults.append("let in")
    if fine and who != OPERATOR and path.endswith(("/load", "/unload")) and drawn.method == "POST":
        faults.append("changed what is served")
    for owner, name in drawing.known:
        if fine and name in drawn.path and owner != who and not sees_all:
            faults.append(f"reached what is {owner}'s")
    return faults
