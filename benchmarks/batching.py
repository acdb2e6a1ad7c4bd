"""Stateless models: batches under 64 clients, and a pipeline whose last stage is slow.

    python -m benchmarks batching -- [--variant V] [--sizes N ...] [--clients N] [--deadline-ms MS]
        [--rounds N] [--seconds S]

**clients**: real servers over HTTP, one a batch size, on the real MiniLM: agents (`overspill edge run`) in 8 bits and
in float32, and cloud tiers (`overspill cloud serve`) with torch, a thread each. Each of 64 clients sends a short text,
waits for its vector, and sends the next one; each request says its deadline. The servers are asked by turns in one run,
and only one is at work at a time. `in_time_per_s` counts answers that came within the deadline, by the client's watch;
`gain` is over batches of 1. `batch` is the mean size of a batch; `server_ms` and `clients_ms` are the CPU time that
each answer took of the server with all its processes, and of all clients. With several texts a request, clients index
documents instead of asking questions.

**ceiling**: the same texts through ONNX Runtime alone, in this process, without server, queue or tokenizer: inputs a
second of CPU time, in batches of 1 and of more. What a batch gains there is the most that dynamic batching can gain on
this machine, whatever the server; `gain` is over batches of 1. `mixed` are texts of 1 to 24 words as they come, which
would be padded to the longest of their batch.

**slow post-process**: the same encoder in a pipeline whose last stage takes 10 ms an input, by 4 threads of its own;
and the same functions one after the other in one worker, as a server does that knows no stages. `model_busy` is the
share of the time that the encoder computed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks._embedding_clients import Clients
from benchmarks._embedding_servers import Server, agent, cloud
from edge_agent.batching.encoder import load_encoder, shape_of
from edge_agent.batching.manifest import read_encoder_manifest
from hardware_profiles.loader import RuntimeOptions
from models.pipelines.batching import BatchSettings
from models.pipelines.embedding import Text, embedding_stages, open_tokenize
from models.pipelines.pipeline import Pipeline, PipelinePlan
from models.pipelines.stage import StagePlan
from models.store.store import ModelStore
from router.base.clock import MonotonicClock

WORDS = tuple(
    "the agent answers first and the cloud takes over when the queue grows too deep for a promise to hold".split()  # noqa: SIM905
)
TEXT_WORDS = 4
FLOAT32 = "all-minilm-l6-v2-fp32-onnx"
TORCH = "all-minilm-l6-v2-fp32"
POST_S = 0.010
POST_WORKERS = 4
PIPELINE_INPUTS = 600
WARM_UP_S = 2.0


def text_of(number: int, words: int = TEXT_WORDS) -> str:
    """Return a short text; no two are the same, or they would count as retries."""
    return f"{number} " + " ".join(WORDS[(number * 7 + step * step) % len(WORDS)] for step in range(words))


@dataclass
class Seen:
    """What the clients saw of one server in all rounds, and what it cost.

    Attributes:
        server_cpu_s: of all its processes; batches, inputs: that its encoder computed.
    """

    max_size: int
    server: Server
    clients: Clients
    server_cpu_s: float = 0.0
    batches: float = 0.0
    inputs: float = 0.0

    def press(self, seconds: float) -> None:
        """Keep the server busy for a while."""
        before = self._figures()
        uvloop.run(self.clients.press(seconds))
        cpu_s, batches, inputs = (after - then for after, then in zip(self._figures(), before, strict=True))
        self.server_cpu_s += cpu_s
        self.batches += batches
        self.inputs += inputs

    def _figures(self) -> tuple[float, float, float]:
        told = httpx.get(f"http://127.0.0.1:{self.clients.port}/metrics").text.splitlines()
        lines = [line for line in told if 'stage="encode"' in line]
        batches, inputs = (
            next(
                (float(line.split()[-1]) for line in lines if line.startswith(f"overspill_stage_batch_inputs_{name}")),
                0.0,
            )
            for name in ("count", "sum")
        )
        return self.server.cpu_s, batches, inputs

    def row(self) -> dict[str, Any]:
        clients = self.clients
        latencies = sorted(took_s for status, took_s in clients.seen if status == 200) or [float("nan")]
        refused = sum(status in {429, 503} for status, _ in clients.seen)
        failed = sum(status not in {200, 429, 503} for status, _ in clients.seen)
        in_time = sum(took_s <= clients.deadline_s for took_s in latencies)
        return {
            "max_size": self.max_size,
            "in_time_per_s": round(in_time / clients.seconds, 1),
            "answered_per_s": round(len(latencies) / clients.seconds, 1),
            "refused_per_s": round(refused / clients.seconds, 1),
            "failed": failed,
            "p50_ms": round(1e3 * statistics.median(latencies), 1),
            "p99_ms": round(1e3 * latencies[int(0.99 * (len(latencies) - 1))], 1),
            "batch": round(self.inputs / max(self.batches, 1), 1),
            "server_ms": round(1e3 * self.server_cpu_s / len(latencies), 2),
            "clients_ms": round(1e3 * clients.client_cpu_s / len(latencies), 2),
        }


@dataclass(frozen=True)
class Load:
    """What is asked of a server."""

    variant: str
    clients: int
    deadline_s: float
    seconds: float
    texts: int
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def inputs(self) -> list[str]:
        """Return the texts of one more request."""
        return [text_of(next(self.numbers)) for _ in range(self.texts)]

    def of(self, server: Server, deadline_s: float) -> Clients:
        """Return the clients of a server."""
        return Clients(server.port, self.clients, self.variant, deadline_s, self.inputs)


def under_clients(servers: dict[int, Server], load: Load, rounds: int) -> list[dict[str, Any]]:
    """Ask the servers by turns."""
    for one in servers.values():
        uvloop.run(load.of(one, 5.0).press(WARM_UP_S))
    found = {size: Seen(size, one, load.of(one, load.deadline_s)) for size, one in servers.items()}
    for turn in range(rounds):
        for size in servers if turn % 2 == 0 else reversed(servers):
            found[size].press(load.seconds)
    return [seen.row() for seen in found.values()]


# ── ONNX Runtime alone ───────────────────────────────────────────────────────────────────────────────────────────────

CEILING_TEXTS = 64
CEILING_ROUNDS = 5
MOST_WORDS = 24
LENGTHS: dict[str, Callable[[int], int]] = {
    "alike": lambda _: TEXT_WORDS,
    "mixed": lambda number: 1 + 7 * number % MOST_WORDS,
}
"""Words of each text."""


def ceiling(variants: Sequence[str], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Compute the clients' texts, and mixed ones, in batches of each size, by turns; the best round of each counts."""
    store, rows = ModelStore(), []
    for variant, lengths in itertools.product(variants, LENGTHS):
        folder = store.artifact_dir(variant)
        manifest = read_encoder_manifest(folder)
        encoder = load_encoder(folder, manifest, RuntimeOptions(intra_op_threads=1), None)
        tokenize = open_tokenize(shape_of(folder, manifest))
        texts = [Text(text_of(number, LENGTHS[lengths](number)), None) for number in range(CEILING_TEXTS)]
        ids = [value.ids for value in tokenize(texts)]
        took_s = {size: float("inf") for size in sizes}
        for _ in range(CEILING_ROUNDS):
            for size in sizes:
                began_s = time.process_time()
                for at in range(0, len(ids), size):
                    encoder.encode(ids[at : at + size])
                took_s[size] = min(took_s[size], time.process_time() - began_s)
        rows += [
            {
                "variant": variant,
                "lengths": lengths,
                "batch": size,
                "tokens_an_input": round(sum(map(len, ids)) / len(ids), 1),
                "inputs_per_cpu_s": round(CEILING_TEXTS / took_s[size], 1),
                "gain": round(took_s[sizes[0]] / took_s[size], 2),
            }
            for size in sizes
        ]
    return rows


# ── a slow last stage ────────────────────────────────────────────────────────────────────────────────────────────────


def slow(batch: list[Any]) -> list[Any]:
    """A post-process that takes 10 ms an input: a database, a file, a service."""
    time.sleep(POST_S * len(batch))
    return batch


@contextlib.asynccontextmanager
async def staged(variant: str, *, apart: bool) -> AsyncIterator[Pipeline]:
    """Give the pipeline of a variant with a slow last stage, which is a stage of its own, or a part of the model's."""
    store = ModelStore()
    folder = store.artifact_dir(variant)
    manifest = read_encoder_manifest(folder)
    encoder = load_encoder(folder, manifest, RuntimeOptions(intra_op_threads=1), None)
    batching = BatchSettings(max_size=16, max_cost=4096)
    stages = embedding_stages(shape_of(folder, manifest), encoder.work, batching)
    if apart:
        post = StagePlan("post", lambda: slow, workers=POST_WORKERS, batching=BatchSettings(4))
        plan = PipelinePlan("staged", (*stages, post))
    else:
        works = [stage.open() for stage in stages]
        busy = Busy(works[1])

        def whole(batch: list[Any]) -> list[Any]:
            parts = [batch[at : at + 4] for at in range(0, len(batch), 4)]
            done = list(busy(list(works[0](batch))))
            _side_by_side([lambda part=part: slow(part) for part in parts])
            return done

        plan = PipelinePlan("one", (StagePlan("whole", lambda: whole, batching=BatchSettings(16)),))
    pipeline = Pipeline(plan, MonotonicClock())
    await pipeline.open()
    try:
        yield pipeline
    finally:
        await pipeline.close()
        if not apart:
            pipeline.stages[0].counters.busy_s = busy.seconds


@dataclass
class Busy:
    """A function that is timed."""

    work: Any
    seconds: float = 0.0

    def __call__(self, batch: list[Any]) -> Any:
        began_s = time.perf_counter()
        try:
            return self.work(batch)
        finally:
            self.seconds += time.perf_counter() - began_s


def _side_by_side(calls: Sequence[Any]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def slow_stage(variant: str) -> list[dict[str, Any]]:
    """Send all inputs at once through both arrangements; their last stages have the same 4 threads."""
    rows = []
    for apart in (False, True):
        async with staged(variant, apart=apart) as pipeline:
            values = [[Text(" ".join([text_of(number)] * 6), None)] for number in range(PIPELINE_INPUTS)]
            began_s = time.perf_counter()
            await asyncio.gather(*(pipeline.run(v, priority=0, due_s=float("inf"), cost=1) for v in values))
            took_s = time.perf_counter() - began_s
        model = next(stage for stage in pipeline.stages if stage.plan.name in {"encode", "whole"})
        rows.append(
            {
                "stages": "each with its own workers" if apart else "one after the other",
                "inputs_per_s": round(PIPELINE_INPUTS / took_s, 1),
                "model_busy": round(model.counters.busy_s / took_s, 3),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    print("  ".join(f"{name:>14}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>14.25}" for value in row.values()))


@dataclass(frozen=True)
class Report:
    """What `--json` holds."""

    variant: str
    clients: int
    deadline_ms: float
    ceiling: list[dict[str, Any]]
    under_clients: list[dict[str, Any]]
    slow_post_process: list[dict[str, Any]]


def compared(load: Load, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Start a server for each batch size, ask them by turns, and say what larger batches gained."""
    start = cloud if load.variant == TORCH else agent
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        servers = {size: stack.enter_context(start(load.variant, size, Path(name))) for size in sizes}
        found = under_clients(servers, load, rounds)
    one = found[0]["in_time_per_s"]
    print(f"\n{load.variant}: {load.clients} clients, {load.texts} text(s) a request, within {load.deadline_s:g} s")
    rows = [
        {"variant": load.variant, "texts": load.texts, **row, "gain": round(row["in_time_per_s"] / max(one, 0.1), 2)}
        for row in found
    ]
    table([{key: row[key] for key in list(row)[2:]} for row in rows])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variant", default="all-minilm-l6-v2-int8")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32], help="inputs of a batch at most")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--deadline-ms", type=float, default=250.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    alone = ceiling(list(dict.fromkeys((given.variant, FLOAT32))), (1, 8, 16, 32))
    print("ONNX Runtime alone, one thread")
    table(alone)
    rows: list[dict[str, Any]] = []
    for variant, texts in ((given.variant, 1), (given.variant, 8), (FLOAT32, 1), (TORCH, 1)):
        load = Load(variant, given.clients, given.deadline_ms / 1e3 * texts, given.seconds, texts)
        rows += compared(load, (1, *given.sizes), given.rounds)
    post = asyncio.run(slow_stage(given.variant))
    print(f"\na post-process of {1e3 * POST_S:g} ms an input in {POST_WORKERS} threads")
    table(post)
    if given.json is not None:
        report = Report(given.variant, given.clients, given.deadline_ms, alone, rows, post)
        given.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
