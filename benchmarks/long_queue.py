"""Whether a long queue holds up the event loop: 10,000 requests wait while answers end and others give up.

    python -m benchmarks long_queue -- [--waiting N] [--seconds S] [--note TEXT]

One dispatcher on the machine's clock, eight replicas on four devices. A task sleeps for a millisecond again and again:
by how much it wakes late is the pause that every other task meets, and `own` what of the time until then this process
computed: the rest it stood still because others had the core. The same is measured first with nobody waiting, for what
the machine itself does. Garbage is looked for as in both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import structlog

from router.base.errors import OverspillError
from router.base.garbage import collect_while_few_wait, spare_what_was_imported
from router.dispatch.dispatcher import Dispatcher
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings

SLOTS = 4
ANSWER_S = 0.5
SETTLE_S = 0.5


def rung_of_two(index: int, decode_tokens_per_s: float) -> ReplicaInfo:
    """Describe a replica: every two of them are the rungs of one device."""
    return ReplicaInfo(
        replica_id=f"replica-{index}",
        endpoint=f"device-{index // 2}",
        tier="edge",
        remote=False,
        family="family",
        variant=f"family-{index % 2}",
        rung=index % 2,
        quality=1.0 - 0.2 * (index % 2),
        context_tokens=8192,
        prior=SpeedPrior(10_000.0, decode_tokens_per_s),
    )


class Engine:
    """A replica that answers one token a tenth of a second."""

    link = None

    def __init__(self, index: int) -> None:
        self.info = rung_of_two(index, 1_000.0)
        self.running = 0

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.info, True, SLOTS, running=self.running)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:  # noqa: ARG002
        self.running += 1
        try:
            gap_s = ANSWER_S / 5 * random.uniform(0.7, 1.3)  # noqa: S311 - engines do not step at the same times
            for _ in range(4):
                await asyncio.sleep(gap_s)
                yield TokenChunk("x")
            await asyncio.sleep(gap_s)
            yield TokenChunk("x", finish_reason=FinishReason.STOP)
        finally:
            self.running -= 1


async def ask(dispatcher: Dispatcher, index: int, deadline_s: float) -> str:
    """Send one request; return how it ended."""
    request = InferenceRequest(
        request_id=str(index),
        model="family",
        prompt=TextPrompt("x"),
        sampling=SamplingParams(),
        objective=Objective(deadline_s=deadline_s, priority=index % 3),
        prompt_tokens=100 + index % 400,
        accepted_at_s=dispatcher.clock.now_s(),
    )
    try:
        answer = await dispatcher.start(request)
        async with contextlib.aclosing(answer.chunks) as chunks:
            async for _ in chunks:
                pass
    except OverspillError as error:
        return error.code
    return "answered"


async def pauses_ms(seconds: float) -> tuple[list[float], list[float]]:
    """Sleep for a millisecond again and again.

    Returns:
        By how much each was late, and how long this process computed during each, in milliseconds, ascending.
    """
    late, own, ends = [], [], time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began, computed = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0.001)
        late.append((time.perf_counter() - began - 0.001) * 1e3)
        own.append((time.thread_time() - computed) * 1e3)
    return sorted(late), sorted(own)


async def measure(waiting: int, seconds: float) -> dict[str, object]:
    """Fill the queue, then measure while a part of it is served and a part gives up."""
    settings = RouterSettings(max_queue=20_000, max_sheddable_queue=20_000, max_wait_ms=600_000.0, decision_log=64)
    spare_what_was_imported()
    async with Dispatcher([Engine(index) for index in range(8)], settings) as dispatcher:
        garbage = asyncio.create_task(collect_while_few_wait(lambda: dispatcher.waiting))  # as both servers do
        idle, _ = await pauses_ms(min(seconds, 5.0))
        tasks = []
        for index in range(waiting):  # a tenth of them may become hopeless while it is measured
            deadline_s = 60.0 + seconds * (index % 100) / 100 if index % 10 == 0 else 3_600.0
            tasks.append(asyncio.create_task(ask(dispatcher, index, deadline_s)))
            if index % 20 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(SETTLE_S)  # the last of them come in twenty at a time
        began, served = dispatcher.waiting, sum(task.done() for task in tasks)
        decided = dispatcher.telemetry.registry.get_sample_value("overspill_decisions_total") or 0.0
        busy, own = await pauses_ms(seconds)
        ended = sum(task.done() for task in tasks) - served
        decisions = (dispatcher.telemetry.registry.get_sample_value("overspill_decisions_total") or 0.0) - decided
        for task in (*tasks, garbage):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "waiting": began,
        "ended": ended,
        "decisions": decisions,
        "idle_p99_ms": round(idle[int(len(idle) * 0.99)], 2),
        "idle_max_ms": round(idle[-1], 2),
        "p99_ms": round(busy[int(len(busy) * 0.99)], 2),
        "max_ms": round(busy[-1], 2),
        "own_p99_ms": round(own[int(len(own) * 0.99)], 2),
        "own_max_ms": round(own[-1], 2),
    }


def main() -> None:
    """Print the figures, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    row = asyncio.run(measure(arguments.waiting, arguments.seconds))
    row["note"] = arguments.note
    for name, value in row.items():
        print(f"{name:<14}{value}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
