"""The command as a user starts it, on the real model: the openai client, and processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.support.fake_engine import toy_model_directory
from tests.support.paths import REPOSITORY
from tests.support.waiting import until_answered, until_true

pytestmark = pytest.mark.real_model
FAMILY, BEST, SMALL = "smollm2-135m", "smollm2-135m-fp32", "smollm2-135m-pruned-fp32"
STORY = "Tell me a long story about a lighthouse keeper and his otter."
TWO_ENGINES = f"""
[server]
port = 0
warm_up = false
drain_s = 30
[[models]]
variant = "{BEST}"
device = "cpu"
dtype = "float32"
tensor_parallel = 2
max_running = 2
kv_cache_tokens = 4096
[[models]]
variant = "{SMALL}"
device = "cpu"
dtype = "float32"
max_running = 2
kv_cache_tokens = 4096
"""
ONE_ENGINE = f"""
[server]
port = 0
warm_up = false
drain_s = 30
[[models]]
variant = "{SMALL}"
device = "cpu"
dtype = "float32"
kv_cache_tokens = 2048
"""


class Tier:
    """`overspill cloud serve` in a process of its own."""

    def __init__(self, config: Path, models_root: Path) -> None:
        self.log = config.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "overspill", "cloud", "serve", "--config", str(config)],
                cwd=REPOSITORY,
                env={**os.environ, "OVERSPILL_MODELS": str(models_root)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.port = 0

    def wait_serving(self) -> None:
        def serving() -> re.Match[str] | None:
            found = re.search(r'"port": (\d+).*"event": "serving"', self.log.read_text())
            assert found or self.process.poll() is None, self.log.read_text()
            return found

        self.port = int(until_true(serving, 90, every_s=0.05)[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def engine_processes(self) -> list[psutil.Process]:
        return [p for p in psutil.Process(self.process.pid).children() if "cloud_tier.engine.worker" in p.cmdline()]

    def kill_engine(self, variant: str) -> None:
        """SIGKILL to rank 0. Only the best variant's has a peer rank to lead."""
        for process in self.engine_processes():
            arguments = process.cmdline()
            follows = any(a.startswith("--leader-fd") for a in arguments)
            leads = any(a.startswith("--peer-fd") for a in arguments)
            if not follows and leads is (variant == BEST):
                process.kill()
                return
        pytest.fail(f"no process of {variant} is running")

    async def metric(self, pattern: str) -> float:
        async with httpx.AsyncClient(base_url=self.url) as client:
            text = (await client.get("/metrics")).text
        found = re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE)
        assert found, f"{pattern} is not in:\n{text}"
        return sum(map(float, found))

    async def restarts(self, variant: str) -> float:
        return await self.metric(rf'overspill_engine_restarts_total{{engine="engine/{variant}"}}')

    async def wait_whole(self) -> None:
        """Return when every engine serves, none computes, and every breaker is closed."""
        engines = (
            rf'overspill_engine_ready{{engine="engine/{BEST}"}}',
            rf'overspill_engine_ready{{engine="engine/{SMALL}"}}',
        )
        async with openai_client(self) as client:
            for pattern, variant in zip(engines, (BEST, SMALL), strict=True):
                await self.until(pattern, lambda ready: ready == 1)
                while True:
                    with contextlib.suppress(openai.APIStatusError):
                        await client.completions.create(model=variant, prompt="x", max_tokens=1)
                        break
                    await asyncio.sleep(0.1)
        await self.wait_idle()

    async def wait_idle(self) -> None:
        await self.until(r"overspill_kv_cache_usage_perc\{.*\}", lambda used: used == 0)

    async def until(self, pattern: str, holds: Callable[[float], bool]) -> None:
        async def held() -> bool:
            return holds(await self.metric(pattern))

        await until_answered(held, 100, every_s=0.05)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.asynccontextmanager
async def openai_client(tier: Tier) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{tier.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory, models_root: Path) -> Iterator[Tier]:
    """Both rungs, started once for the file."""
    config = tmp_path_factory.mktemp("cloud") / "two.toml"
    config.write_text(TWO_ENGINES)
    running = Tier(config, models_root)
    try:
        running.wait_serving()
        yield running
    finally:
        running.end()


@pytest.fixture
async def whole(tier: Tier) -> Tier:
    await tier.wait_whole()
    return tier


@pytest.fixture
async def client(whole: Tier) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(whole) as opened:
        yield opened


def _chat(text: str, **more) -> dict:
    return {"model": FAMILY, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


async def test_the_capital_of_france(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(**_chat("What is the capital of France?"))
    answer = raw.parse()
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert raw.headers["x-overspill-model"] == BEST
    assert raw.headers["x-overspill-rung"] == "0"


async def test_a_variant_can_be_pinned(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(**_chat("Hello", model=SMALL, max_tokens=4))
    assert raw.headers["x-overspill-model"] == SMALL
    listed = {model.id async for model in client.models.list()}
    assert {FAMILY, BEST, SMALL} <= listed
    with pytest.raises(openai.NotFoundError, match="did you mean"):
        await client.chat.completions.create(**_chat("Hello", model="smollm2-135m-fp23"))


async def test_streaming_says_the_same_as_one_reply_and_counts_it(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**_chat("Name three colours.", max_tokens=24))
    stream = await client.chat.completions.create(
        **_chat("Name three colours.", max_tokens=24, stream=True, stream_options={"include_usage": True})
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    counted, before = chunks[-1].usage, whole.usage
    assert (counted.prompt_tokens, counted.completion_tokens) == (before.prompt_tokens, before.completion_tokens)
    assert counted.total_tokens == before.total_tokens, "what a cache held of the prompt may differ"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


async def test_a_stop_string_ends_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**_chat("What is the capital of France?", stop=[" Paris"]))
    assert answer.choices[0].message.content == "The capital of France is"
    assert answer.choices[0].finish_reason == "stop"


async def test_completions_continue_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=FAMILY, prompt="One, two, three, four, five,", max_tokens=6, temperature=0
    )
    assert "six" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 6


async def test_a_seed_makes_sampling_repeatable(client: openai.AsyncOpenAI) -> None:
    async def text(seed: int) -> str:
        answer = await client.chat.completions.create(
            **_chat(STORY, model=BEST, max_tokens=16, seed=seed) | {"temperature": 1.0}
        )
        return answer.choices[0].message.content

    first, again, other = await asyncio.gather(text(7), text(7), text(8))
    assert first == again
    assert first != other


async def test_cancelling_in_mid_stream_frees_the_cache(whole: Tier, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**_chat(STORY, max_tokens=1500, stream=True))
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == 3:
            break
    assert await whole.metric(r"overspill_kv_cache_usage_perc\{.*\}") > 0
    await stream.close()
    await whole.wait_idle()
    assert await whole.metric(rf'overspill_num_requests_running{{model_name="{BEST}",replica="engine/{BEST}"}}') == 0


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b'{"model": "smollm2-135m", "messages": [', 400, "JSON"),
        (b"\xff\xfe{", 400, "JSON"),
        (b'{"model": "smollm2-135m", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, ""),
        (b'{"model": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400, "max_tokens"),
        (b'{"model": 3, "messages": [{"role": "user", "content": "x"}]}', 400, "model"),
        (b'{"model": "smollm2-135m", "messages": []}', 400, "messages"),
    ],
)  # fmt: skip
async def test_bad_input_is_named(whole: Tier, body: bytes, status: int, named: str) -> None:
    async with httpx.AsyncClient(base_url=whole.url) as client:
        reply = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert named in error["message"]
    assert isinstance(error["code"], str)


async def test_a_prompt_longer_than_every_window_is_refused_at_once(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(**_chat("word " * 9000))
    assert raised.value.code == "context_length_exceeded"


async def test_killed_in_mid_stream_the_next_rung_goes_on_and_who_wants_no_other_hears_of_it(
    whole: Tier, client: openai.AsyncOpenAI
) -> None:
    restarts = await whole.restarts(BEST)
    free = await client.chat.completions.create(**_chat(STORY, max_tokens=24, stream=True))
    pinned = await client.chat.completions.create(**_chat(STORY, model=BEST, max_tokens=400, stream=True))
    before = [await anext(free) for _ in range(6)]
    await anext(pinned)
    whole.kill_engine(BEST)

    async def rest(stream: openai.AsyncStream) -> list:
        return [chunk async for chunk in stream]

    with pytest.raises(openai.APIError) as raised:
        await rest(pinned)
    assert isinstance(raised.value.code, str)
    chunks = before + await rest(free)
    assert chunks[-1].choices[0].finish_reason == "length"
    decision = await _decision(whole, free.response.headers["x-request-id"])
    assert decision["tokens"] == 24, "nothing lost, nothing doubled"
    await whole.wait_whole()
    assert await whole.restarts(BEST) == restarts + 1
    answer = await client.chat.completions.create(**_chat("What is the capital of France?", model=BEST))
    assert "Paris" in answer.choices[0].message.content


async def test_killed_with_a_queue_nobody_waits_for_ever(whole: Tier, client: openai.AsyncOpenAI) -> None:
    async def ask(number: int) -> str:
        try:
            answer = await client.chat.completions.create(**_chat(f"{number}. {STORY}", model=BEST, max_tokens=40))
        except openai.APIStatusError as error:
            return "refused" if _refused_cleanly(error) else f"{error.status_code}: {error.message}"
        return answer.choices[0].finish_reason

    asked = [asyncio.create_task(ask(number)) for number in range(8)]
    await whole.until(
        rf'overspill_num_requests_running{{model_name="{BEST}",replica="engine/{BEST}"}}', lambda running: running == 2
    )
    whole.kill_engine(BEST)
    ends = await asyncio.wait_for(asyncio.gather(*asked), 60)
    assert set(ends) <= {"refused", "length", "stop"}
    assert "refused" in ends


async def test_sigterm_finishes_the_stream_ends_every_process_and_exits_0(tmp_path: Path, models_root: Path) -> None:
    (tmp_path / "one.toml").write_text(ONE_ENGINE)
    running = Tier(tmp_path / "one.toml", models_root)
    try:
        running.wait_serving()
        engines = running.engine_processes()
        assert len(engines) == 1
        async with openai_client(running) as client:
            stream = await client.chat.completions.create(**_chat(STORY, max_tokens=40, stream=True))
            pieces, finish = 0, None
            async for chunk in stream:
                pieces += 1
                finish = chunk.choices[0].finish_reason or finish
                if pieces == 3:
                    running.process.send_signal(signal.SIGTERM)
            assert finish == "length"
        assert await asyncio.to_thread(running.process.wait, 20) == 0
        assert not any(engine.is_running() for engine in engines)
        events = [json.loads(line)["event"] for line in running.log.read_text().splitlines()]
        assert events[-3:] == ["draining", "request", "stopped"]
    finally:
        running.end()


def test_a_killed_parent_leaves_no_engine_behind(tmp_path: Path, models_root: Path) -> None:
    toy = toy_model_directory(tmp_path / "toy")
    config = f'[server]\nport = 0\n[[models]]\npath = "{toy}"\ndevice = "cpu"\ndtype = "float32"\ntensor_parallel = 2\n'
    (tmp_path / "toy.toml").write_text(config)
    running = Tier(tmp_path / "toy.toml", models_root)
    try:
        running.wait_serving()
        engines = running.engine_processes()
        running.process.kill()
        running.process.wait()
        gone, alive = psutil.wait_procs(engines, timeout=10)
        assert not alive
        assert len(gone) == 2
    finally:
        running.end()


def _refused_cleanly(error: openai.APIStatusError) -> bool:
    """An OpenAI-shaped 502, or a 429 or 503 that says when to come back."""
    if not isinstance(error.code, str):
        return False
    return error.status_code == 502 or (
        error.status_code in {429, 503} and float(error.response.headers["retry-after-ms"]) > 0
    )


async def _decision(tier: Tier, request_id: str) -> dict:
    async with httpx.AsyncClient(base_url=tier.url) as client:
        return (await client.get(f"/v1/decisions/{request_id}")).json()
