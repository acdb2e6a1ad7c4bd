"""Constrained answers: is every one valid, also when another tier goes on with it, and what do they cost?

    python -m benchmarks structured -- [--schemas 1000] [--regexes 200] [--only answers|cost]

SmolLM2-135M on both tiers: the cloud's engine (W8A8, a process of its own) and the device's INT8 artifact. Random JSON
schemas and regular expressions, each asked at temperature 0.8, so that the model alone would hardly ever match them.
One in four is begun on the device. Every third answer is left after 1 to 24 tokens, and continued by the other tier.
JSON is checked with `jsonschema` (Draft 2020-12, formats included), regular expressions with `re`. An answer that was
cut at its cap is no answer yet: it counts apart, as a beginning that the constraint still allows, or one it does not.

The cost is what eight sequences that decode side by side take under a constraint and free, in turns, the order of each
turn changed: processor time of all processes a token, which other work on the machine hardly changes, and tokens a
second, which it does. What is masked in threads beside the model counts as processor time, and need not as tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks._random_constraints import Regexes, Schemas, invalid
from benchmarks.live.running import run
from cloud_tier.engine.protocol import EngineConfig
from cloud_tier.engine.torch_engine import TorchEngine
from cloud_tier.replicas import EngineReplica
from edge_agent.config import LocalModels
from edge_agent.serving.lineup import Lineup
from edge_agent.serving.local_models import Shelf, local_models
from hardware_profiles.loader import load_profiles
from models.store.store import ModelStore
from models.text.chat import PromptEncoder
from models.text.grammar import Grammars
from router.base.errors import InvalidRequest
from router.values.chunk import FinishReason, TokenChunk
from router.values.constraint import Constraint, ConstraintKind
from router.values.prompt import ChatPrompt, Message
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams

FAMILY = "smollm2-135m"
EDGE_VARIANT = "smollm2-135m-int8"
MOST_TOKENS = 160
BATCH = 8
AT_ONCE = {"cloud": 32, "device": BATCH}
COST_TOKENS = 40
COST_ROUNDS = 5
LIMIT_S = 2400


class Replica(Protocol):
    def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]: ...


@dataclass(frozen=True)
class Tier:
    """One of the two, and how many answers it is asked for at once."""

    name: str
    replica: Replica
    room: asyncio.Semaphore


@dataclass
class Seen:
    """What became of the answers, and what was wrong with those that were not valid.

    Attributes:
        whole, continued: by what became of them: of answers of one tier, and of those that another went on with.
        begun: by the tier that they began on.
    """

    whole: Counter[str] = field(default_factory=Counter)
    continued: Counter[str] = field(default_factory=Counter)
    begun: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


async def said_by(
    tier: Tier, constraint: Constraint, seed: int, before: str = "", leave_after: int = MOST_TOKENS
) -> tuple[str, FinishReason | None, int]:
    """Return the answer, why it ended (None: it was left after so many tokens), and its tokens."""
    prompt = ChatPrompt((Message("user", "Make something up. Be short, and put all of it on one line."),))
    sampling = SamplingParams(temperature=0.8, seed=seed, max_tokens=MOST_TOKENS, constraint=constraint)
    request = InferenceRequest(f"s{seed}", FAMILY, prompt, sampling, Objective(), 0, 0.0, continuation=before)
    text, tokens = before, 0
    async with tier.room, aclosing(tier.replica.generate(request)) as chunks:
        async for chunk in chunks:
            text, tokens = text + chunk.text, tokens + chunk.tokens
            if chunk.finish_reason is not None:
                return text, chunk.finish_reason, tokens
            if tokens >= leave_after:
                break
    return text, None, tokens


async def one(tiers: tuple[Tier, Tier], grammars: Grammars, constraint: Constraint, number: int, seen: Seen) -> None:
    first, second = tiers[::-1] if number % 4 == 3 else tiers
    seen.begun[first.name] += 1
    try:
        leave_after = MOST_TOKENS if number % 3 else number // 3 % 24 + 1
        text, reason, tokens = await said_by(first, constraint, number, leave_after=leave_after)
        continued = reason is None
        if continued:
            text, reason, more = await said_by(second, constraint, number, text)
            tokens += more
    except InvalidRequest as error:
        seen.whole["refused"] += 1
        seen.wrong.append(f"{error.message}: {constraint.source}")
        return
    seen.tokens += tokens
    cut = reason is FinishReason.LENGTH
    why = not_begun_rightly(grammars, constraint, text) if cut else invalid(constraint, text)
    if why is not None:
        seen.wrong.append(f"{why}: {text!r} under {constraint.source}")
    (seen.continued if continued else seen.whole)["invalid" if why else "cut" if cut else "valid"] += 1


def not_begun_rightly(grammars: Grammars, constraint: Constraint, text: str) -> str | None:
    """Return why no answer begins so, None if one does. By the library that led it: no other knows beginnings."""
    try:
        grammars.matcher(constraint, text.removesuffix("\N{REPLACEMENT CHARACTER}"))
    except InvalidRequest as error:
        return error.message
    return None


async def every(tiers: tuple[Tier, Tier], grammars: Grammars, constraints: list[Constraint]) -> Seen:
    seen, todo = Seen(), list(enumerate(constraints))

    async def caller() -> None:
        while todo:
            number, constraint = todo.pop()
            await one(tiers, grammars, constraint, number, seen)
            if number % 50 == 0:
                sys.stderr.write(f"{len(todo)} left; whole {dict(seen.whole)}, continued {dict(seen.continued)}\n")

    await asyncio.gather(*(caller() for _ in range(sum(AT_ONCE.values()))))
    return seen


COSTLY = {
    "schema": Constraint(
        ConstraintKind.JSON_SCHEMA,
        '{"type":"array","minItems":400,"items":{"type":"object","properties":{"name":{"type":"string",'
        '"maxLength":24},"age":{"type":"integer","minimum":0,"maximum":120},"tags":{"type":"array","items":'
        '{"type":"string"}}},"required":["name","age","tags"],"additionalProperties":false}}',
    ),
    "regex": Constraint(ConstraintKind.REGEX, r"([A-Z][a-z]{1,9}( [a-z]{2,12}){2,8}[.?!] ){200}"),
}
"""Constraints under which no answer ends by itself while it is measured."""


async def decode(replica: Replica, constraint: Constraint | None, turn: int) -> tuple[float, float]:
    """Return processor milliseconds a token, and tokens a second, of `BATCH` sequences behind their prompts."""
    times: list[float] = []
    behind_prompts = BATCH * 8
    began: list[float] = []

    async def sequence(number: int) -> None:
        prompt = ChatPrompt((Message("user", f"Tell me about number {number}."),))
        sampling = SamplingParams(
            temperature=0.8,
            seed=turn * 100 + number,
            max_tokens=COST_TOKENS,
            min_tokens=COST_TOKENS,
            constraint=constraint,
        )
        request = InferenceRequest(f"c{number}", FAMILY, prompt, sampling, Objective(), 0, 0.0)
        async for chunk in replica.generate(request):
            times.extend([time.perf_counter()] * chunk.tokens)
            if len(times) >= behind_prompts and not began:
                began.extend([processor_s(), len(times)])

    await asyncio.gather(*(sequence(number) for number in range(BATCH)))
    tokens = len(times) - began[1]
    spent_s = processor_s() - began[0]
    return spent_s / tokens * 1e3, tokens / (times[-1] - times[-int(tokens) - 1])


def processor_s() -> float:
    """Return the processor time of this process and of those that it started."""
    own = psutil.Process()
    spent = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(times.user + times.system for times in spent))


async def cost(replica: Replica, constraint: Constraint) -> dict[str, float]:
    """Compare in turns, and say what the median turn lost."""
    for each in (constraint, None):
        await decode(replica, each, 99)
    free: list[tuple[float, float]] = []
    held: list[tuple[float, float]] = []
    for turn in range(COST_ROUNDS):
        order: list[tuple[list[tuple[float, float]], Constraint | None]] = [(free, None), (held, constraint)]
        for found, asked in order if turn % 2 else order[::-1]:
            found.append(await decode(replica, asked, turn))
    pairs = list(zip(free, held, strict=True))
    return {
        "batch": BATCH,
        "free_cpu_ms_a_token": round(statistics.median(cpu for cpu, _ in free), 3),
        "constrained_cpu_ms_a_token": round(statistics.median(cpu for cpu, _ in held), 3),
        "cpu_overhead": round(statistics.median(led[0] / plain[0] for plain, led in pairs) - 1, 4),
        "free_tokens_per_s": round(statistics.median(rate for _, rate in free), 1),
        "constrained_tokens_per_s": round(statistics.median(rate for _, rate in held), 1),
        "time_overhead": round(statistics.median(plain[1] / led[1] for plain, led in pairs) - 1, 4),
    }


@asynccontextmanager
async def both_tiers() -> AsyncIterator[tuple[Tier, Tier, Grammars]]:
    """The cloud's engine, the device's model, and what knows their constraints."""
    store = ModelStore()
    path = store.source_path(FAMILY)
    engine = TorchEngine(
        EngineConfig(weights=str(path), dtype="int8", max_running=AT_ONCE["cloud"], max_context_tokens=1024)
    )
    await engine.start()
    prior = SpeedPrior(100.0, 10.0, 0.1, "not measured")
    info = ReplicaInfo("cloud", "cloud", "cloud", False, FAMILY, FAMILY, 0, 1.0, 1024, prior)
    settings = LocalModels(
        variants=(EDGE_VARIANT,), preload=(EDGE_VARIANT,), intra_op_threads=1, kv_slots=AT_ONCE["device"]
    )
    profile, shelf = load_profiles()["generic-x86-cpu"], Shelf.open(settings)
    encoder = PromptEncoder.load(path)
    try:
        async with Lineup(lambda wanted: local_models(wanted, profile, shelf), lambda _: None) as lineup:
            await lineup.apply(settings)
            replicas = {"cloud": EngineReplica(engine, encoder, info), "device": lineup.replicas[0]}
            cloud, device = (Tier(name, replicas[name], asyncio.Semaphore(most)) for name, most in AT_ONCE.items())
            yield cloud, device, Grammars(lambda: encoder.tokenizer)
    finally:
        await engine.stop()


async def answers(cloud: Tier, device: Tier, grammars: Grammars, schemas: int, regexes: int) -> dict[str, Any]:
    made, patterns = Schemas(1), Regexes(2)
    constraints = [Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(made.next())) for _ in range(schemas)]
    constraints += [Constraint(ConstraintKind.REGEX, patterns.next()) for _ in range(regexes)]
    random.Random(3).shuffle(constraints)  # noqa: S311 (a benchmark's load)
    began_s = time.monotonic()
    seen = await every((cloud, device), grammars, constraints)
    return {
        "schemas": schemas,
        "regexes": regexes,
        "most_tokens": MOST_TOKENS,
        "whole": dict(seen.whole),
        "continued_on_the_other_tier": dict(seen.continued),
        "begun_on": dict(seen.begun),
        "tokens": seen.tokens,
        "took_s": round(time.monotonic() - began_s, 1),
        "wrong": seen.wrong[:20],
    }


async def measure(schemas: int, regexes: int, *, only: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with both_tiers() as (cloud, device, grammars):
        if only != "cost":
            found["answers"] = await answers(cloud, device, grammars, schemas, regexes)
        if only != "answers":
            found["cost"] = {
                tier.name: {name: await cost(tier.replica, constraint) for name, constraint in COSTLY.items()}
                for tier in (cloud, device)
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--regexes", type=int, default=200)
    parser.add_argument("--only", choices=["answers", "cost"], default="")
    options = parser.parse_args()
    found = run(measure(options.schemas, options.regexes, only=options.only), LIMIT_S)
    text = json.dumps(found, indent=2)
    if options.json is not None:
        options.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    if found.get("answers", {}).get("wrong"):
        sys.exit("an answer was not valid, or a constraint was refused")


if __name__ == "__main__":
    main()
