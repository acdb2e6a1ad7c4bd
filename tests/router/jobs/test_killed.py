"""A real tier, started by its command and killed in the middle of a batch: each line is answered exactly once."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest

from examples.demo.processes import Child, free_port, overspill
from tests.support.foreign_server import ForeignServer
from tests.support.job_tier import ended, line, lines_of, submit
from tests.support.waiting import until_answered

pytestmark = pytest.mark.process

_BACKEND = """
port = {port}

[[backends]]
name = "stub"
urls = ["{url}"]
warm_up = false

[jobs]
dir = "{folder}/jobs"
min_free_mbytes = 0
"""
_CONFIG = {"cloud": f"[server]{_BACKEND}", "edge": f"[models]\nvariants = []\npreload = []\n[gateway]{_BACKEND}"}


async def _ready(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:

        async def look() -> bool:
            with contextlib.suppress(httpx.TransportError):
                models = await http.get("/v1/models")
                return models.status_code == 200 and bool(models.json()["data"])
            return False

        await until_answered(look, 60, every_s=0.1)


@pytest.mark.parametrize("tier", ["cloud", "edge"])
async def test_a_tier_that_is_killed_twice_answers_each_line_once(tmp_path: Path, tier: str) -> None:
    async with ForeignServer() as stub:
        port = free_port()
        config = tmp_path / "tier.toml"
        config.write_text(_CONFIG[tier].format(port=port, url=stub.url, folder=tmp_path))
        command = "serve" if tier == "cloud" else "run"
        child = Child(tier, overspill(tier, command, "--config", str(config)), tmp_path / "tier.log")
        child.start()
        try:
            url = f"http://127.0.0.1:{port}"
            await _ready(url)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
                body = {"model": "m"}
                lines = [
                    line(f"id-{n}", "", body={**body, "messages": [{"role": "user", "content": f"word {n}"}]})
                    for n in range(600)
                ]
                batch = await submit(client, lines)
                for share in (150, 350):
                    await until_answered(lambda share=share: _answered(client, batch.id, share), 60, every_s=0.02)
                    child.kill()
                    child.start()
                    await _ready(url)
                done = await ended(client, batch.id, 120)
                assert done.status == "completed", (tmp_path / "tier.log").read_text()[-3000:]
                assert done.request_counts.completed == 600
                answers = await lines_of(client, done.output_file_id)
                assert [answer["custom_id"] for answer in answers] == [each["custom_id"] for each in lines]
                contents = {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers}
                assert contents == {"one two three four"}
        finally:
            child.kill()
        asked = Counter(item["messages"][0]["content"] for item in stub.bodies if "word" in str(item))
        assert len(asked) == 600
        # What was not committed when the tier was killed is computed again; nothing else is.
        assert sum(asked.values()) <= 600 + 2 * 600 // 3


async def _answered(client: openai.AsyncOpenAI, batch_id: str, lines: int) -> bool:
    return (await client.batches.retrieve(batch_id)).request_counts.completed >= lines
