"""Time to the first token of a chat's later turns on the device, with and without the KV cache of the turns before.

    python -m benchmarks prefix_reuse -- [--chats N] [--turns N] [--answer-tokens N] [--threads N]

SmolLM2 INT8 on the device's own replica and generation loop, one chat after the other. Each turn is asked twice in a
row, as the same token ids: by the chat's caller, who left the turns before, and by a caller who was never there before.
Answers that are drawn anew find all that was kept; repeatable ones (greedy here) find whole chunks of the prompt, and
come out bit for bit as if nothing had been kept. What keeping a cache and taking it back costs is measured beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from edge_agent.config import LocalModels
from edge_agent.runtime.onnx.runtime import open_onnx
from edge_agent.runtime.protocol import RuntimeRequest, StepInput
from edge_agent.serving.lineup import Lineup, ServedHere
from edge_agent.serving.local_models import Shelf, effective_settings, local_models
from hardware_profiles.loader import Profile, RuntimeOptions, load_profiles
from models.store.store import ModelStore
from router.base.host import usable_cores
from router.values.prompt import ChatPrompt, Message
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams

VARIANT = "smollm2-135m-int8"
PROFILE = "generic-x86-cpu"
SYSTEM = (
    "You help the guests of a small hotel by the sea. Breakfast is from seven to ten, the beach is five minutes away, "
    "and the last bus to the town leaves at eleven in the evening. Be friendly, answer in a few sentences, and never "
    "promise what the house does not have: there is no pool, no parking for buses, and no room service at night."
)
QUESTIONS = (
    "Good morning! We have just arrived with two children. What could we do on our first day, if it does not rain?",
    "That sounds good. And where would we find something simple to eat at noon, not too far from the beach?",
    "One of us does not eat meat. Would that be a problem there, or should we rather take something along?",
    "In the evening we want to go to the town. How do we get there, and how do we come back when it is late?",
    "Thank you. Tomorrow it may rain all day long. Do you know something that children of six and nine would enjoy?",
    "One last thing: our flight home leaves early on Sunday. Can we have breakfast before seven on that day?",
)
PARKED_TOKENS = 1024
MODES = {"drawn anew": SamplingParams(temperature=0.7), "repeatable": SamplingParams(temperature=0.0)}
_numbers = itertools.count()


@dataclass(frozen=True)
class Row:
    """One turn of all chats of a mode: medians, and the least times, which other work on the machine changes least."""

    mode: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    ttft_kept_ms: float
    ttft_fresh_ms: float
    least_kept_ms: float
    least_fresh_ms: float


@dataclass(frozen=True)
class Asked:
    """One answer: its text, its TTFT, and what the replica told of the prompt."""

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


async def ask(replica: ServedHere, messages: list[Message], caller: str, sampling: SamplingParams) -> Asked:
    prompt = ChatPrompt(tuple(messages))
    number = f"bench-{next(_numbers)}"
    request = InferenceRequest(number, VARIANT, prompt, sampling, Objective(), 0, 0.0, caller=caller)
    began_s = time.perf_counter()
    chunks, ttft_s = [], 0.0
    async for chunk in replica.generate(request):
        ttft_s = ttft_s or time.perf_counter() - began_s
        chunks.append(chunk)
    text = "".join(chunk.text for chunk in chunks)
    return Asked(text, ttft_s, chunks[-1].prompt_tokens or 0, chunks[0].cached_tokens or 0)


async def chat(replica: ServedHere, mode: str, turns: int, answer_tokens: int) -> list[tuple[Asked, Asked]]:
    """Have one chat; each turn as (of the chat's caller, of a stranger)."""
    drawn = MODES[mode]
    sampling = SamplingParams(answer_tokens, drawn.temperature, ignore_eos=True)
    once = SamplingParams(1, drawn.temperature, ignore_eos=True)
    caller, messages = f"chat {next(_numbers)}", [Message("system", SYSTEM)]
    found = []
    for question in QUESTIONS[:turns]:
        messages.append(Message("user", question))
        kept = await ask(replica, messages, caller, sampling)
        fresh = await ask(replica, messages, f"stranger {next(_numbers)}", once)
        found.append((kept, fresh))
        messages.append(Message("assistant", kept.text))
    return found


async def measure(settings: LocalModels, profile: Profile, chats: int, turns: int, answer_tokens: int) -> list[Row]:
    shelf = Shelf.open(settings)
    seen: dict[tuple[str, int], list[tuple[Asked, Asked]]] = defaultdict(list)
    async with Lineup(lambda wanted: local_models(wanted, profile, shelf), lambda _: None) as lineup:
        await lineup.apply(settings)
        (replica,) = lineup.replicas
        await chat(replica, "drawn anew", 1, 4)  # warm
        for _ in range(chats):
            for mode in MODES:
                for turn, pair in enumerate(await chat(replica, mode, turns, answer_tokens), 1):
                    seen[mode, turn].append(pair)
    return [
        Row(
            mode,
            turn,
            round(statistics.median(kept.prompt_tokens for kept, _ in pairs)),
            round(statistics.median(kept.cached_tokens for kept, _ in pairs)),
            round(1e3 * statistics.median(kept.ttft_s for kept, _ in pairs), 1),
            round(1e3 * statistics.median(fresh.ttft_s for _, fresh in pairs), 1),
            round(1e3 * min(kept.ttft_s for kept, _ in pairs), 1),
            round(1e3 * min(fresh.ttft_s for _, fresh in pairs), 1),
        )
        for (mode, turn), pairs in sorted(seen.items())
    ]


def keeping_ms(threads: int) -> dict[str, float]:
    """Return what it takes to keep the cache of `PARKED_TOKENS` tokens, and to go on with it: medians in ms."""
    options = RuntimeOptions(intra_op_threads=threads)
    folder = ModelStore().artifact_dir(VARIANT)
    runtime = open_onnx(RuntimeRequest(folder, options, slots=4, context_tokens=2048, chunk_tokens=128))
    ids = [1, *(100 + index * 37 % 20_000 for index in range(PARKED_TOKENS))]
    sequence, cached = runtime.open(ids, "bench")
    for start in range(cached, PARKED_TOKENS, 128):
        runtime.forward([StepInput(sequence, ids[start : min(start + 128, PARKED_TOKENS)])])
    took: dict[str, list[float]] = {"keep": [], "take back": []}
    for _ in range(15):
        began_s = time.perf_counter()
        runtime.close_sequence(sequence, keep=True)
        kept_s = time.perf_counter()
        sequence, cached = runtime.open(ids, "bench")
        took["keep"].append(kept_s - began_s)
        took["take back"].append(time.perf_counter() - kept_s)
    runtime.close()
    return {name: round(1e3 * statistics.median(seconds), 2) for name, seconds in took.items()}


def table(rows: list[Row], costs: dict[str, float]) -> Table:
    title = "time to first token of a chat on the device, median (least)"
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("answers", "turn", "prompt", "cached", "nothing kept, ms", "kept, ms", ""):
        shown.add_column(name, justify="left" if name == "answers" else "right")
    for row in rows:
        gain = f"{row.ttft_fresh_ms / row.ttft_kept_ms:.1f}× ({row.least_fresh_ms / row.least_kept_ms:.1f}×)"
        fresh = f"{row.ttft_fresh_ms:,.0f} ({row.least_fresh_ms:,.0f})"
        times = fresh, f"{row.ttft_kept_ms:,.0f} ({row.least_kept_ms:,.0f})"
        shown.add_row(row.mode, str(row.turn), str(row.prompt_tokens), str(row.cached_tokens), *times, gain)
    shown.caption = "; ".join(f"to {name} {PARKED_TOKENS} tokens: {ms:.1f} ms" for name, ms in costs.items())
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--turns", type=int, default=len(QUESTIONS))
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=usable_cores())
    wanted = parser.parse_args()
    profile = load_profiles()[PROFILE]
    chosen = LocalModels(variants=(VARIANT,), preload=(VARIANT,), intra_op_threads=wanted.threads)
    settings = effective_settings(chosen, profile)
    rows = asyncio.run(measure(settings, profile, wanted.chats, wanted.turns, wanted.answer_tokens))
    costs = keeping_ms(wanted.threads)
    Console().print(table(rows, costs))
    if wanted.json:
        result = {
            "variant": VARIANT,
            "threads": wanted.threads,
            "chats": wanted.chats,
            "answer_tokens": wanted.answer_tokens,
            "chunk_tokens": settings.prefill_chunk_tokens,
            "kv_slots": settings.kv_slots,
            "rows": [asdict(row) for row in rows],
            "keeping_ms": {"tokens": PARKED_TOKENS, **costs},
        }
        wanted.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
