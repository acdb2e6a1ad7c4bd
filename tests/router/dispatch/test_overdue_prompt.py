"""A prompt that is overdue tells that its device is slow while it is still computed: what comes next goes elsewhere."""

from __future__ import annotations

import asyncio

from router.values.settings import HedgeSettings
from tests.support.router_fakes import World, request, world

PROMPT_TOKENS = 1000


async def next_goes_to(w: World, after_s: float) -> str:
    """Return the tier of a request that comes so long after a prompt began of which no text has come."""
    w.local.faults = ["hang"]
    hanging = asyncio.ensure_future(w.read(request(w.clock, PROMPT_TOKENS, max_tokens=2)))
    await w.clock.advance(after_s)
    assert w.local.open == 1
    route, _ = await w.clock.run(w.ask(max_tokens=2, ttft_s=2.0))
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    return route.tier


async def test_a_request_goes_elsewhere_while_a_prompt_on_the_device_is_overdue() -> None:
    async with world(hedge=HedgeSettings(enabled=False)) as w:
        w.dispatcher.set_replicas([w.local, w.cloud])
        assert await next_goes_to(w, after_s=0.5) == "edge"
    async with world(hedge=HedgeSettings(enabled=False)) as w:
        w.dispatcher.set_replicas([w.local, w.cloud])
        assert await next_goes_to(w, after_s=10.0) == "cloud"
