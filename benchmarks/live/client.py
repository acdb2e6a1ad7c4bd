"""A caller that costs little: one POST, its events timed as they come, and what the reply says of who answered."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.live.workload import Ask

GIVE_UP_S = 60.0
MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Target:
    """Whom to ask: a base URL without `/v1`, a key, and headers that make the difference between two systems."""

    name: str
    url: str
    key: str = "none"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """What a caller saw of one request. Times are seconds from its start.

    Attributes:
        began_s: its start, by the monotonic clock.
        status: of HTTP; 0 where there was no reply.
        last_s: when its last text came, or the event that says why it ends.
        marks: when text came, and how many characters there were then.
        tokens: of the answer, by its usage.
        tier, variant: who answered, where the reply says so.
    """

    ask: Ask
    request_id: str = ""
    began_s: float = 0.0
    status: int = 0
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    finish: str = ""
    tier: str = ""
    variant: str = ""
    text: str = ""
    error: str = ""
    marks: list[tuple[float, int]] = field(default_factory=list)
    sent_late_s: float = 0.0

    def tokens_until(self, at_s: float) -> float:
        """Return how many tokens had come by a moment; by characters, of which all tokens have about as many."""
        chars = max((chars for mark_s, chars in self.marks if mark_s <= at_s), default=0)
        return self.tokens * chars / max(len(self.text), 1)

    @property
    def whole(self) -> bool:
        """The whole answer: to its own end where only the stop string ends it, else all tokens that were asked for."""
        if self.ask.open_length:
            return self.finish == "stop"
        return self.finish == "length" and self.tokens >= self.ask.answer_tokens

    @property
    def kept(self) -> bool:
        """A whole answer, and every time that was asked for."""
        asked = self.ask.objective
        if not self.whole or self.first_s is None or self.last_s is None:
            return False
        tpot_s = (self.last_s - self.first_s) / max(self.tokens - 1, 1)
        times = ((asked.ttft_s, self.first_s), (asked.deadline_s, self.last_s), (asked.tpot_s, tpot_s))
        return all(limit_s is None or took_s <= limit_s for limit_s, took_s in times)

    @property
    def outcome(self) -> str:
        """`kept`, `late` (whole, but not in time), `cut`, `refused` (429, 503) or `failed`."""
        if self.status in {429, 503}:
            return "refused"
        if self.status != 200 or self.error or not self.finish:
            return "failed"
        return ("kept" if self.kept else "late") if self.whole else "cut"

    def row(self) -> dict[str, object]:
        """Return what a result keeps of it; no text."""
        ask = self.ask
        return {
            "arrival_s": round(ask.arrival_s, 3),
            "prompt_tokens": ask.prompt_tokens,
            "answer_tokens": ask.answer_tokens,
            "kind": ask.kind,
            "open_length": ask.open_length,
            "outcome": self.outcome,
            "variant": self.variant,
            "tokens": self.tokens,
            "first_s": None if self.first_s is None else round(self.first_s, 4),
            "last_s": None if self.last_s is None else round(self.last_s, 4),
        }


async def ask_one(session: aiohttp.ClientSession, target: Target, ask: Ask) -> Seen:
    """Send one request and follow its stream; never raises for what a server does."""
    seen = Seen(ask, request_id=uuid.uuid4().hex)
    began_s = seen.began_s = time.monotonic()
    headers = {
        "authorization": f"Bearer {target.key}",
        "x-request-id": seen.request_id,
        **ask.headers,
        **target.headers,
    }
    try:
        async with session.post(
            f"{target.url}/v1/completions", json={"model": MODEL, **ask.body}, headers=headers
        ) as reply:
            seen.status = reply.status
            seen.tier = reply.headers.get("x-overspill-tier", "")
            seen.variant = reply.headers.get("x-overspill-model", "")
            if reply.status != 200:
                seen.error = (await reply.text())[:300]
                return seen
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    _take(seen, json.loads(line[6:]), time.monotonic() - began_s)
    except asyncio.TimeoutError:
        seen.error = f"not over within the {GIVE_UP_S:g} s that this benchmark waits"
    except (aiohttp.ClientError, OSError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    return seen


async def in_turn(target: Target, asks: Sequence[Ask], callers: int) -> list[Seen]:
    """Send every request, whenever it is due: `callers` at a time, each as soon as the one before has ended."""
    room = asyncio.Semaphore(callers)
    async with _session() as session:

        async def one(ask: Ask) -> Seen:
            async with room:
                return await ask_one(session, target, ask)

        return list(await asyncio.gather(*(one(ask) for ask in asks)))


async def replay(target: Target, asks: Sequence[Ask]) -> list[Seen]:
    """Send every request when it is due, whatever became of those before; return what was seen, in order."""
    async with _session() as session:
        began_s = time.monotonic()

        async def one(ask: Ask) -> Seen:
            await asyncio.sleep(began_s + ask.arrival_s - time.monotonic())
            late_s = time.monotonic() - began_s - ask.arrival_s
            seen = await ask_one(session, target, ask)
            seen.sent_late_s = late_s
            return seen

        return list(await asyncio.gather(*(one(ask) for ask in asks)))


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=GIVE_UP_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**18)


def _take(seen: Seen, event: Mapping[str, object], now_s: float) -> None:
    if isinstance(event.get("error"), dict):
        seen.error = json.dumps(event["error"])[:300]
    usage = event.get("usage")
    if isinstance(usage, dict):
        seen.tokens = int(usage.get("completion_tokens") or 0)
        seen.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        text = choice.get("text")
        if text:
            seen.first_s = now_s if seen.first_s is None else seen.first_s
            seen.last_s = now_s
            seen.text += text
            seen.marks.append((now_s, len(seen.text)))
        if choice.get("finish_reason"):
            seen.finish = choice["finish_reason"]
            seen.last_s = now_s if seen.first_s is not None else None
