"""Seven scenes, each with a promise it checks on what the caller saw."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import openai

from examples.demo.processes import overspill
from examples.demo.show import SceneResult, Screen
from examples.demo.stack import DEVICE, FLEET, Stack
from examples.demo.traffic import Ask, Reply, send

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
COUNT = "Count from 1 to 40, one number after the other, separated by commas: 1, 2, 3 and so on up to 40."
LOCAL = {"x-overspill-locality": "local-only"}
CLOUD = {"x-overspill-locality": "cloud-only"}
_MOST_SLOWER = 2.0
SHORT = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "What do bees make?",
    "Give a synonym for happy.",
    "Why is the sky blue? One sentence.",
    "How many days are in a week?",
    "Say hello in Spanish.",
)


@dataclass
class Stage:
    """What a scene plays on.

    Attributes:
        pace_ms: the device's time for one token, alone, as scene 1 measured it. Objectives are multiples of it, so that
            a fast machine is as busy with a scene as a slow one.
        cloud_slower: how many times as long the cloud takes for one, as scene 2 measured it, from 1 to 2. Its two ranks
            wait for each other, and much longer where something else keeps one of two cores busy.
    """

    stack: Stack
    client: openai.AsyncOpenAI
    screen: Screen
    pace_ms: float = 0.0
    cloud_slower: float = 1.0

    def tokens_ms(self, tokens: float) -> str:
        """The time in which the device alone writes so many tokens, for a header."""
        return f"{max(tokens * self.pace_ms, 400.0):.0f}"

    async def play(self, result: SceneResult, asks: Sequence[Ask], every_s: float = 0.0) -> list[Reply]:
        """Send all asks, at once or one by one; print each line as it ends."""

        async def later(index: int, ask: Ask) -> Reply:
            await asyncio.sleep(index * every_s)
            return await self.one(result, ask)

        replies = await asyncio.gather(*(later(index, ask) for index, ask in enumerate(asks)))
        return list(replies)

    async def one(self, result: SceneResult, ask: Ask, on_text: Callable[[Reply], None] | None = None) -> Reply:
        reply = await send(self.client, ask, on_text)
        result.replies.append(reply)
        self.screen.reply(reply)
        return reply


async def short_chat(stage: Stage, result: SceneResult) -> None:
    for prompt in SHORT[:3]:
        await stage.one(result, Ask(prompt))
    result.check("Paris" in result.replies[0].text, f"the capital of France is Paris, not {result.replies[0].text!r}")
    result.check(all(r.served for r in result.replies), "every short chat is answered")
    result.check(all(r.tier == "edge" for r in result.replies), "a short chat is answered on the device")
    alone = await stage.one(result, Ask(COUNT, max_tokens=48, full_length=True, headers=LOCAL))
    result.check(alone.served, f"the device's pace can be measured: {alone.error}")
    stage.pace_ms = (alone.e2e_ms - (alone.ttft_ms or 0.0)) / 47
    result.facts.append(f"alone, the device writes a token in {stage.pace_ms:.0f} ms; the promises below follow it")


async def long_document(stage: Stage, result: SceneResult) -> None:
    document = (LICENSE.read_text() * 2)[:15_300]
    reply = await stage.one(result, Ask(f"{document}\n\nIn one sentence: what is this document?", max_tokens=32))
    result.check(reply.served and reply.tier == "cloud", "a document beyond the device's window goes to the cloud")
    result.check(reply.prompt_tokens > 2048, f"the document is longer than the window: {reply.prompt_tokens} tokens")
    result.check("context" in reply.reason, f"the reason is its context, not {reply.reason!r}")
    alone = await stage.one(result, Ask(COUNT, max_tokens=32, full_length=True, headers=CLOUD))
    result.check(alone.served, f"the cloud's pace can be measured: {alone.error}")
    pace_ms = (alone.e2e_ms - (alone.ttft_ms or 0.0)) / 31
    stage.cloud_slower = min(max(pace_ms / stage.pace_ms, 1.0), _MOST_SLOWER)
    result.facts.append(f"alone, the cloud writes a token in {pace_ms:.0f} ms")


async def overflow(stage: Stage, result: SceneResult) -> None:
    # The slower of both can keep the promise, and answers are as much longer: the device has no room for all of them.
    # However slow the machine is, it has 4 slots, and the cloud 8.
    headers = {"x-overspill-ttft-slo-ms": stage.tokens_ms(160 * stage.cloud_slower)}
    length = round(80 * stage.cloud_slower)
    prompts = [f"{prompt} Tell me all about it." for prompt in SHORT + SHORT[:3]]
    asks = [Ask(prompt, max_tokens=length, headers=headers, full_length=True) for prompt in prompts]
    await stage.play(result, asks)
    tiers = Counter(reply.tier for reply in result.replies)
    result.check(all(r.served for r in result.replies), "every request of the burst is answered")
    result.check(tiers["edge"] > 0 and tiers["cloud"] > 0, f"the burst fills the edge and overflows: {dict(tiers)}")
    result.check(any(r.reason == "overflow" for r in result.replies), "the reason for the cloud is overflow")


async def beyond_both(stage: Stage, result: SceneResult) -> None:
    """Requests come faster than both tiers can serve them, for a while; they allow shorter answers."""
    headers = {
        "x-overspill-ttft-slo-ms": stage.tokens_ms(180),
        "x-overspill-deadline-ms": stage.tokens_ms(550),
        "x-overspill-shorten": "allow",
    }
    asks = [Ask(f"{SHORT[i % len(SHORT)]} ({i})", max_tokens=128, headers=headers, full_length=True) for i in range(72)]
    started_s = time.monotonic()
    await stage.play(result, asks, every_s=0.15)
    refused = [r for r in result.replies if not r.served]
    smaller = [r for r in result.replies if r.served and "pruned" in r.variant]
    capped = [r for r in result.replies if r.served and r.max_tokens is not None]
    # Told with the first text, or found on the way: an answer may also reach its deadline a few tokens before its end.
    shorter = [r for r in result.replies if r.served and r.completion_tokens < r.ask.max_tokens]
    result.facts.append(
        f"{len(smaller)} answered by a smaller rung, {len(shorter)} with a shorter answer, {len(refused)} refused "
        f"with a time to come back; all {len(asks)} ended within {time.monotonic() - started_s:.1f} s"
    )
    deadline_ms = float(headers["x-overspill-deadline-ms"])
    late = [r for r in result.replies if r.served and r.e2e_ms > deadline_ms * 1.1 + 300]
    result.check(not late, f"no answer runs past its deadline of {deadline_ms:.0f} ms: {len(late)} did")
    result.check(len(smaller) > 0, "under overload some requests step down to a smaller rung")
    result.check(len(shorter) > 0, "under overload some answers become shorter")
    result.check(all(r.outcome == "degraded" for r in smaller + capped), "a degraded answer says so")
    result.check(len(refused) > 0, "what fits nowhere is shed")
    result.check(all(r.refused_properly for r in refused), "every refusal says when to come back")


async def cloud_killed(stage: Stage, result: SceneResult) -> None:
    """The device is busy, so an answer begins in the cloud; in the middle of it the cloud's power is cut."""
    killed = asyncio.Event()
    victims: list[Reply] = []

    def cut_the_power(reply: Reply) -> None:
        if reply.tier == "cloud" and len(counted(reply.text)) >= 8 and not killed.is_set():
            stage.stack.cloud.kill()
            victims.append(reply)
            killed.set()

    busy = [Ask(COUNT, max_tokens=220, headers=LOCAL, full_length=True) for _ in range(4)]
    local = [asyncio.create_task(stage.one(result, ask)) for ask in busy]
    await asyncio.sleep(0.3)
    headers = {"x-overspill-ttft-slo-ms": stage.tokens_ms(150), "x-overspill-min-quality": "0.9"}
    overflowing = stage.one(result, Ask(COUNT, max_tokens=150, headers=headers), cut_the_power)
    await asyncio.gather(overflowing, *local)
    result.check(killed.is_set(), "an answer overflowed to the cloud, and the cloud was killed in the middle of it")
    for victim in victims:
        await _check_seam(stage, result, victim)
    after = [await stage.one(result, Ask(prompt, max_tokens=24)) for prompt in SHORT[:2]]
    result.check(all(r.served and r.tier == "edge" for r in after), "the next requests stay local")


async def _check_seam(stage: Stage, result: SceneResult, victim: Reply) -> None:
    """The numbers before and after the seam must be one sequence: nothing doubled, nothing lost."""
    result.check(victim.served, f"the broken answer was finished on the edge: {victim.error}")
    record = await stage.stack.decision(victim.request_id)
    seams = [event for event in record["events"] if event["event"] == "failover"]
    result.check(len(seams) == 1, "the decision record names the failover")
    if not seams:
        return
    numbers = counted(victim.text)
    seam = int(seams[0]["emitted_chars"])
    around = victim.text[max(0, seam - 12) : seam + 12].replace("\n", " ")
    result.facts.append(f"{seam} characters came from the cloud, the rest from the edge: “…{around}…”")
    steps = [after - before for before, after in pairwise(numbers)]
    counted_on = numbers[0] == 1 and all(step == 1 for step in steps[: min(len(steps), 39)])
    result.check(counted_on, f"the count goes on over the seam without a gap or a repeat: {numbers}")
    same = victim.completion_tokens == record["tokens"]
    result.check(same, f"the usage counts both parts: {victim.completion_tokens} of {record['tokens']} tokens")


async def cloud_back(stage: Stage, result: SceneResult) -> None:
    down = await stage.one(result, Ask(SHORT[0], max_tokens=8, headers={"x-overspill-locality": "cloud-only"}))
    result.check(down.refused_properly, "while the cloud is down, cloud-only is refused with a time to come back")
    stage.stack.start_cloud_again()
    await stage.stack.cloud_ready()
    state = ""
    async with httpx.AsyncClient() as client:
        for _ in range(150):
            metrics = (await client.get(f"{stage.stack.edge_url}/metrics", timeout=5)).text
            found = re.search(r'overspill_breaker_state\{endpoint="http[^"]*"\} (\d)', metrics)
            state = {"0": "closed", "1": "half_open", "2": "open"}.get(found[1], "") if found else "closed"
            if state == "closed":
                break
            await asyncio.sleep(0.1)
    result.check(state == "closed", f"the breaker closes once the cloud is back, it is {state}")
    for _ in range(50):  # the next poll of the upstream tells that it has room again
        reply = await send(stage.client, Ask(SHORT[0], max_tokens=12, headers={"x-overspill-locality": "cloud-only"}))
        if reply.served:
            break
        await asyncio.sleep(reply.retry_after_s or 0.2)
    result.replies.append(reply)
    stage.screen.reply(reply)
    result.check(reply.served and reply.tier == "cloud", "and the cloud answers again")


async def fleet_changes_policy(stage: Stage, result: SceneResult) -> None:
    # Time enough that both tiers keep the promise, on a busy machine too: then the policy alone tells where it goes.
    patient = Ask(SHORT[0], max_tokens=16, headers={"x-overspill-ttft-slo-ms": "60000"})
    before = await stage.one(result, patient)
    command, returncode, output = await fleet_set(stage.stack, "router.policy=cloud-first")
    stage.screen.note(command)
    stage.screen.note(output)
    result.check(returncode == 0, f"the device applies it: {output}")
    after = await stage.one(result, patient)
    result.check(before.tier == "edge" and after.tier == "cloud", "the next request shows the new policy")


async def fleet_set(stack: Stack, *change: str) -> tuple[str, int | None, str]:
    """Run `overspill fleet set` on the demo's device; returns the command, its exit code and what it said."""
    command = overspill("fleet", "set", DEVICE, *change, "--fleet", FLEET, "--broker", f"127.0.0.1:{stack.broker_port}")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return f"overspill {' '.join(command[3:])}", process.returncode, output.decode().strip()


def counted(text: str) -> list[int]:
    """The numbers of a counting answer, in order."""
    return [int(number) for number in re.findall(r"\d+", text)]


SCENES: tuple[tuple[str, Callable[[Stage, SceneResult], Awaitable[None]]], ...] = (
    ("a short chat stays on the device", short_chat),
    ("a long document goes to the cloud", long_document),
    ("a burst fills the edge and overflows", overflow),
    ("beyond both: smaller rungs, shorter answers, then shed", beyond_both),
    ("the cloud dies in mid-stream", cloud_killed),
    ("the cloud is back", cloud_back),
    ("the fleet operator changes the policy", fleet_changes_policy),
)
