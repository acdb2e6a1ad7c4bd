"""Two hundred clients of the real `openai` library, each with its retries, on a tier that a fifth of them would fill.

A client asks, thinks for a moment, and asks again; it gives up an answer after its timeout and retries as the library
does: backing off, honouring `retry-after-ms`. Goodput is the answers that came in time. Its peak is the best over
numbers of clients; the storm is the largest number, and the half minute after the device stood still.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field, replace

import httpx
import openai

from benchmarks.tenants.house import KEYS, MODEL, GivesUp, House, Setting, opened
from router.base import logs
from router.simulation.loop import VirtualLoop, run_virtually

PROMPT, ANSWER = 200, 64
TIMEOUT_S = 20.0
RETRIES = 5
THINK_S = 2.0
WARM_UP_S = 20.0
LASTS_S = 40.0
STANDS_S = 20.0
AFTER_S = 60.0


@dataclass
class Seen:
    """When answers came in time, and what else happened."""

    good_at_s: list[float] = field(default_factory=list)
    failed_at_s: list[float] = field(default_factory=list)

    def rate(self, began_s: float, lasted_s: float) -> float:
        return sum(began_s <= at_s < began_s + lasted_s for at_s in self.good_at_s) / lasted_s


@logs.at_least(logging.CRITICAL)
def run(clients: int, setting: Setting, seed: int, *, outage: bool) -> dict[str, object]:
    """Return answers in time a second, in steady state and, with an outage, after it."""
    seen = run_virtually(lambda loop: _live_through(clients, setting, seed, loop, outage=outage))
    found: dict[str, object] = {
        "clients": clients,
        "retries": setting.retries,
        "seed": seed,
        "goodput_per_s": round(seen.rate(WARM_UP_S, LASTS_S), 3),
        "failed_per_s": round(sum(at_s >= WARM_UP_S for at_s in seen.failed_at_s) / LASTS_S, 3),
    }
    if outage:
        back_s = WARM_UP_S + LASTS_S + STANDS_S
        found["goodput_after_outage_per_s"] = round(seen.rate(back_s, AFTER_S), 3)
    return found


async def _live_through(clients: int, setting: Setting, seed: int, loop: VirtualLoop, *, outage: bool) -> Seen:
    seen = Seen()
    async with opened(replace(setting, callers=0.0), loop) as house:
        http = httpx.AsyncClient(transport=GivesUp(house.transport))
        sdk = openai.AsyncOpenAI(
            api_key=KEYS["a"],
            base_url="http://tier/v1",
            http_client=http,  # type: ignore[arg-type,unused-ignore]  # some releases name a copy of httpx for its type
            max_retries=RETRIES,
            timeout=TIMEOUT_S,
        )
        sdk._platform = "Linux"  # noqa: SLF001 - it would ask for it in a thread, and there are none here
        tasks = [
            asyncio.create_task(_client(sdk, loop, seen, random.Random(f"{seed} {number}")))  # noqa: S311
            for number in range(clients)
        ]
        random.seed(seed)  # the library's jitter
        await asyncio.sleep(WARM_UP_S + LASTS_S)
        if outage:
            await _stand_still(house)
            await asyncio.sleep(AFTER_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await http.aclose()
    return seen


async def _stand_still(house: House) -> None:
    house.device.set_speed(0.0)
    await asyncio.sleep(STANDS_S)
    house.device.set_speed(1.0)


async def _client(sdk: openai.AsyncOpenAI, loop: VirtualLoop, seen: Seen, draw: random.Random) -> None:
    await asyncio.sleep(draw.uniform(0, THINK_S))
    while True:
        words = " ".join(f"w{draw.randrange(10**6)}" for _ in range(PROMPT))
        try:
            await sdk.completions.create(model=MODEL, prompt=words, max_tokens=ANSWER, extra_body={"ignore_eos": True})
        except openai.APIError:
            seen.failed_at_s.append(loop.now_s)
        else:
            seen.good_at_s.append(loop.now_s)
        await asyncio.sleep(draw.expovariate(1 / THINK_S))
