"""A real edge agent whose uplink is cut: deferred requests outlive a kill, and are answered when the link is back."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from examples.demo.processes import Child, free_port, overspill
from tests.support.foreign_server import ForeignServer
from tests.support.waiting import until, until_answered

pytestmark = pytest.mark.process

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
CONFIG = """
[models]
variants = []
preload = []

[gateway]
port = {port}

[router]
ttft_slo_ms = 500.0

[[backends]]
name = "uplink"
urls = ["{uplink}"]
warm_up = false
poll_interval_s = 0.2

[jobs]
dir = "{folder}/jobs"
min_free_mbytes = 0
webhook_url = "{hook}"
webhook_secret = "{secret}"
"""


async def test_requests_outlive_a_cut_uplink_and_a_killed_agent(tmp_path: Path) -> None:
    told: list[dict] = []

    async def take(request: web.Request) -> web.Response:
        told.append(json.loads(await request.read()))
        return web.Response()

    receiver = web.Application()
    receiver.router.add_post("/hook", take)
    runner = web.AppRunner(receiver)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port, uplink = free_port(), free_port()
    config = tmp_path / "edge.toml"
    hook = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    config.write_text(
        CONFIG.format(port=port, uplink=f"http://127.0.0.1:{uplink}", folder=tmp_path, hook=hook, secret=SECRET)
    )
    edge = Child("edge", overspill("edge", "run", "--config", str(config)), tmp_path / "edge.log")
    edge.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:

            async def serves() -> bool:
                try:
                    return "not reached yet" in (await http.get("/health/ready")).text
                except httpx.TransportError:
                    return False

            await until_answered(serves, 60, every_s=0.1)
            paths = []
            for number in range(6):
                body = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]}
                reply = await http.post("/v1/chat/completions", json=body, headers={"x-overspill-defer": "allow"})
                assert reply.status_code == 202, reply.text
                paths.append(reply.headers["location"])
            edge.kill()
            edge.start()
            await until_answered(serves, 60, every_s=0.1)
            assert [(await http.get(path)).status_code for path in paths] == [202] * 6
            async with ForeignServer() as server:
                await web.TCPSite(server._runner, "127.0.0.1", uplink).start()

                async def all_answered() -> bool:
                    return all([(await http.get(path)).status_code == 200 for path in paths])

                await until_answered(all_answered, 90, every_s=0.2)
                asked = [body["messages"][0]["content"] for body in server.bodies if "question" in str(body)]
                assert sorted(asked) == [f"question {number}" for number in range(6)]
            for path in paths:
                answer = (await http.get(path)).json()["response"]["body"]
                assert answer["choices"][0]["message"]["content"] == "one two three four"
            await until(lambda: len(told) >= 6)
            assert sorted(event["data"]["id"] for event in told) == sorted(path.rpartition("/")[2] for path in paths)
    finally:
        edge.kill()
        await runner.cleanup()
