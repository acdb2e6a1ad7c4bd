"""What the decision file costs a request: on the event loop, in its thread, and in pauses of the loop.

    python -m benchmarks decision_file -- [--requests N]

The real dispatcher serves N requests over 2 and 8 replicas that answer at once, without the file and with it, in turns.
`append` is what the loop pays for a line (the target is 20 µs); `line` is what the thread pays; both in processor time.
`request` is the time of a whole request, and `late` how late a timer of the loop rang while they ran.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import structlog

from router.decisions.line import Decision
from router.decisions.settings import DecisionFileSettings
from router.decisions.writer import DecisionFile
from router.dispatch.dispatcher import Dispatcher
from router.signals.link import Link
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings

CANDIDATES = (2, 8)
TURNS = 3
_BESIDE = 8
_TIMER_S = 0.001


class AtOnce:
    """A replica that answers four tokens at once."""

    def __init__(self, index: int) -> None:
        remote = index % 2 == 1
        endpoint = "http://cloud:8700" if remote else "local"
        prior = SpeedPrior(1000.0, 60.0)
        family, rung = "smollm2-135m", index % 4
        self.info = ReplicaInfo(
            f"replica-{index}", endpoint, "cloud" if remote else "edge", remote, family, f"{family}-{index}", rung,
            1.0 - 0.1 * rung, 8192, prior,
        )  # fmt: skip
        self.link = Link(endpoint).snapshot() if remote else None

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.info, True, 64, running=2, pending_decode_tokens=400)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:  # noqa: ARG002
        for _ in range(4):
            yield TokenChunk("word ", 1)
        yield TokenChunk("", 0, finish_reason=FinishReason.STOP)


class Timed:
    """A decision file whose `append` and whose lines are timed."""

    def __init__(self, file: DecisionFile) -> None:
        self._file = file
        self.append_us: list[float] = []
        self.line_us: list[float] = []

    def append(self, tell: Callable[[], Decision]) -> None:
        def timed() -> Decision:
            began = time.thread_time_ns()
            told = tell()
            self.line_us.append((time.thread_time_ns() - began) / 1e3)
            return told

        began = time.thread_time_ns()
        self._file.append(timed)
        self.append_us.append((time.thread_time_ns() - began) / 1e3)


async def measure(candidates: int, requests: int, folder: Path | None) -> dict[str, object]:
    """Serve `requests`, eight beside each other, with the file in `folder` or without one."""
    file = DecisionFile(DecisionFileSettings(path=str(folder / "decisions.jsonl"))) if folder else None
    async with contextlib.AsyncExitStack() as stack:
        timed = Timed(await stack.enter_async_context(file)) if file else None
        replicas = [AtOnce(index) for index in range(candidates)]
        dispatcher = await stack.enter_async_context(Dispatcher(replicas, RouterSettings(), decisions=timed))
        late_ms: list[float] = []
        watch = asyncio.create_task(_watch(late_ms))
        began = time.perf_counter()
        await asyncio.gather(*(_ask(dispatcher, number, requests // _BESIDE) for number in range(_BESIDE)))
        took_s = time.perf_counter() - began
        watch.cancel()
    served = requests // _BESIDE * _BESIDE
    row: dict[str, object] = {
        "candidates": candidates,
        "file": folder is not None,
        "request_us": round(took_s / served * 1e6, 1),
        "late_p99_ms": round(_quantile(late_ms, 0.99), 2),
        "late_most_ms": round(max(late_ms), 2),
    }
    if timed is not None and file is not None:
        row |= {
            "append_median_us": round(statistics.median(timed.append_us), 2),
            "append_p99_us": round(_quantile(timed.append_us, 0.99), 2),
            "line_median_us": round(statistics.median(timed.line_us), 1),
            "written": file.written,
            "lost": sum(file.lost),
            "bytes_a_line": round(sum(p.stat().st_size for p in folder.glob("*.jsonl*")) / served) if folder else 0,  # noqa: ASYNC240
        }
    return row


async def _ask(dispatcher: Dispatcher, number: int, count: int) -> None:
    for index in range(count):
        request = InferenceRequest(
            request_id=f"{number:016x}{index:016x}",
            model="smollm2-135m",
            prompt=TextPrompt(""),
            sampling=SamplingParams(max_tokens=128),
            objective=Objective(ttft_s=5.0, deadline_s=20.0, session=f"session-{number}"),
            prompt_tokens=200,
            accepted_at_s=dispatcher.clock.now_s(),
            prompt_bytes=1000,
        )
        answer = await dispatcher.start(request)
        async with contextlib.aclosing(answer.chunks) as chunks:
            async for _ in chunks:
                pass


async def _watch(late_ms: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(_TIMER_S)
        late_ms.append((time.perf_counter() - began - _TIMER_S) * 1e3)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main() -> None:
    """Print the table, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=4000)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    rows = []
    for candidates in CANDIDATES:
        for _ in range(TURNS):
            rows.append(asyncio.run(measure(candidates, arguments.requests, None)))
            with tempfile.TemporaryDirectory() as folder:
                rows.append(asyncio.run(measure(candidates, arguments.requests, Path(folder))))
    names = list(rows[1])
    print("  ".join(f"{name:>16}" for name in names))
    for row in rows:
        print("  ".join(f"{row.get(name, '')!s:>16}" for name in names))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
