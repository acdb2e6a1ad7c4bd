"""One tenant asks for ten times what the other does, in device-seconds, and that for half of what the device can do."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

import httpx

from benchmarks.tenants.house import KEYS, MODEL, House, Setting, name_of, opened
from router.base import logs
from router.simulation.loop import VirtualLoop, run_virtually


@dataclass(frozen=True)
class Mix:
    """What a tenant's requests are like: tokens of prompt and answer.

    Attributes:
        spread: both are drawn exponentially around these, else all are equal.
    """

    prompt: int
    answer: int
    spread: bool = True

    def drawn(self, draw: random.Random) -> tuple[int, int]:
        """Return the tokens of one request."""
        if not self.spread:
            return self.prompt, self.answer
        prompt, answer = (max(1, min(1_500, round(draw.expovariate(1 / mean)))) for mean in (self.prompt, self.answer))
        return prompt, answer


MIXES = {
    "equal": (Mix(200, 64, spread=False), Mix(200, 64, spread=False)),
    "alike": (Mix(200, 64), Mix(200, 64)),
    "short against long": (Mix(40, 16), Mix(600, 160)),
    "long against short": (Mix(600, 160), Mix(40, 16)),
}
"""Of the one who floods, and of the other."""
WARM_UP_S = 60.0
LASTS_S = 180.0


@logs.at_least(logging.CRITICAL)
def run(mix: str, setting: Setting, seed: int) -> dict[str, object]:
    """Return what the other tenant got, in device-seconds, of what it asked for and of what there was."""
    flood, other = MIXES[mix]
    asked_per_s = 0.5 / setting.cost_s(other.prompt, other.answer)
    both = _lived(
        setting, {"b": (other, asked_per_s), "a": (flood, 10 * 0.5 / setting.cost_s(flood.prompt, flood.answer))}, seed
    )
    got, flooded = both["b"], both["a"]
    given_s = got.got_s + flooded.got_s
    fair_s = min(got.asked_s, given_s / 2)
    return {
        "mix": mix,
        "callers": setting.callers,
        "seed": seed,
        "asked_share": round(got.asked_s / given_s, 4),
        "got_share": round(got.got_s / given_s, 4),
        "got_of_fair": round(got.got_s / fair_s, 4),
        "refused": got.refused,
        "device_busy": round(given_s / LASTS_S, 4),
    }


@dataclass
class Got:
    """What a tenant asked for and got after the warm-up, in device-seconds."""

    asked_s: float = 0.0
    got_s: float = 0.0
    refused: int = 0


def _lived(setting: Setting, demand: dict[str, tuple[Mix, float]], seed: int) -> dict[str, Got]:
    async def life(loop: VirtualLoop) -> dict[str, Got]:
        found = {tenant: Got() for tenant in demand}
        async with opened(setting, loop) as house:
            sending = [
                asyncio.create_task(_send(house, loop, tenant, mix, rate, random.Random(f"{seed} {tenant}"), got))  # noqa: S311
                for (tenant, (mix, rate)), got in zip(demand.items(), found.values(), strict=True)
            ]
            await asyncio.sleep(WARM_UP_S)
            before = {tenant: house.served(name_of(tenant)) for tenant in demand}
            await asyncio.sleep(LASTS_S)
            for tenant, got in found.items():
                tokens = (now - then for now, then in zip(house.served(name_of(tenant)), before[tenant], strict=True))
                _, prompt, answer = tokens
                got.got_s = setting.cost_s(prompt, answer)
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
        return found

    return run_virtually(life)


async def _send(  # noqa: PLR0917 - what one sender is
    house: House, loop: VirtualLoop, tenant: str, mix: Mix, rate: float, draw: random.Random, got: Got
) -> None:
    """Send at random moments, whatever becomes of those sent before."""
    running: set[asyncio.Task[None]] = set()
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    async with httpx.AsyncClient(transport=house.transport, base_url="http://tier", headers=headers) as http:
        try:
            while True:
                await asyncio.sleep(draw.expovariate(rate))
                prompt, answer = mix.drawn(draw)
                counted = WARM_UP_S <= loop.now_s < WARM_UP_S + LASTS_S
                if counted:
                    got.asked_s += house.setting.cost_s(prompt, answer)
                task = asyncio.create_task(_one(http, prompt, answer, got, counted=counted))
                running.add(task)
                task.add_done_callback(running.discard)
        finally:
            for task in list(running):
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _one(http: httpx.AsyncClient, prompt: int, answer: int, got: Got, *, counted: bool) -> None:
    body = {"model": MODEL, "prompt": "word " * prompt, "max_tokens": answer, "ignore_eos": True}
    reply = await http.post("/v1/completions", json=body)
    got.refused += counted and reply.status_code != 200
