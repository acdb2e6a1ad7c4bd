"""Constrained answers: is every one valid, also when another tier goes on with it, and what do they cost?

    python -m benchmarks structured -- [--schemas 1000] [--regexes 200] [--only answers|cost]

SmolLM2-135M on both tiers: the cloud's engine (W8A8, a process of its own) and the device's INT8 artifact. Random JSON
schemas and regular expressions, each asked at temperature 0.9, so that the model alone would hardly ever match them.
Every other answer is begun by one tier, left after 1 to 24 tokens, and continued by the other. JSON is checked with
`jsonschema` (Draft 2020-12, formats included), regular expressions with `re`. An answer that ends with `length` was
cut, says so, and counts apart.

The cost is tokens a second of eight sequences that decode side by side in the engine, under a schema and free, in
turns; and of as many as the device has slots.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jsonschema

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
from router.base.errors import InvalidRequest
from router.values.chunk import FinishReason, TokenChunk
from router.values.constraint import Constraint, ConstraintKind
from router.values.prompt import ChatPrompt, Message
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams

FAMILY = "smollm2-135m"
EDGE_VARIANT = "smollm2-135m-int8"
MOST_TOKENS = 400
BATCH = 8
COST_TOKENS = 96
COST_ROUNDS = 5
LIMIT_S = 3600


class Replica(Protocol):
    def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]: ...


class Schemas:
    """Random schemas whose answers are short."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)  # noqa: S311 (a benchmark's load)

    def next(self) -> dict[str, Any]:
        schema = self._object(3)
        if self._draw.random() < 0.2:
            schema["$defs"] = {"part": self._scalar()}
            schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        kind = self._draw.random()
        if depth == 0 or kind < 0.6:
            return self._scalar()
        if kind < 0.75:
            return self._object(depth - 1)
        if kind < 0.9:
            least = self._draw.randint(0, 2)
            return {"type": "array", "items": self._any(depth - 1), "minItems": least, "maxItems": least + 2}
        return {"anyOf": [self._scalar() for _ in range(self._draw.randint(2, 3))]}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._draw.sample(
            ["id", "name", "größe", "a b", "tags", "x-y", "kind", "n", "when", "ok"], self._draw.randint(1, 4)
        )
        required = [name for name in names if self._draw.random() < 0.7]
        properties = {name: self._any(depth) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _scalar(self) -> dict[str, Any]:
        draw = self._draw
        least = draw.randint(-50, 50)
        length = draw.randint(0, 6)
        choices: list[Callable[[], dict[str, Any]]] = [
            lambda: {"type": "string", "minLength": length, "maxLength": length + draw.randint(0, 12)},
            lambda: {
                "type": "string",
                "pattern": draw.choice(["^[A-Z]{2}[0-9]{3}$", "^(yes|no|maybe)$", "^[a-f0-9]{4,8}$"]),
            },
            lambda: {"type": "string", "format": draw.choice(["date", "ipv4", "uuid", "time", "date-time"])},
            lambda: {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 5000)},
            lambda: {"type": "number", "minimum": least, "exclusiveMaximum": least + draw.randint(1, 99)},
            lambda: {"type": draw.choice(["boolean", "null"])},
            lambda: {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            lambda: {"enum": draw.sample(["red", "green", 3, None, True, 'q"uote', "ü"], 3)},
            lambda: {"const": draw.choice(["fixed", 7, None])},
        ]
        return draw.choice(choices)()


class Regexes:
    """Random regular expressions whose matches are short."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)  # noqa: S311 (see above)

    def next(self) -> str:
        return "".join(self._part(2) for _ in range(self._draw.randint(1, 5)))

    def _part(self, depth: int) -> str:
        draw = self._draw
        if depth and draw.random() < 0.35:
            inner = "|".join(
                "".join(self._part(depth - 1) for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(1, 3))
            )
            return f"({inner})" + draw.choice(["", "?", "{1,2}"])
        atom = draw.choice(
            ["[a-z]", "[A-F0-9]", r"\d", "[^aeiou\\s]", "the ", "größe", r"\.", "🙂", r"\s", "[+-]", "x"]
        )
        return atom + draw.choice(["", "", "?", "{2}", "{1,4}", "+" if atom in ("x", r"\d") else ""])


@dataclass
class Seen:
    """What became of the answers, and what was wrong with those that were not valid."""

    ends: Counter[str] = field(default_factory=Counter)
    continued: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


async def said_by(
    replica: Replica, constraint: Constraint, seed: int, before: str = "", leave_after: int = MOST_TOKENS
) -> tuple[str, FinishReason | None, int]:
    """Return the answer, why it ended (None: it was left after so many tokens), and its tokens."""
    prompt = ChatPrompt((Message("user", "Make something up."),))
    sampling = SamplingParams(temperature=0.9, seed=seed, max_tokens=MOST_TOKENS, constraint=constraint)
    request = InferenceRequest(f"s{seed}", FAMILY, prompt, sampling, Objective(), 0, 0.0, continuation=before)
    text, tokens = before, 0
    async with aclosing(replica.generate(request)) as chunks:
        async for chunk in chunks:
            text, tokens = text + chunk.text, tokens + chunk.tokens
            if chunk.finish_reason is not None:
                return text, chunk.finish_reason, tokens
            if tokens >= leave_after:
                break
    return text, None, tokens


async def one(tiers: tuple[Replica, Replica], constraint: Constraint, number: int, seen: Seen) -> None:
    first, second = tiers if number % 4 < 2 else tiers[::-1]
    try:
        leave_after = number % 24 + 1 if number % 2 else MOST_TOKENS
        text, reason, tokens = await said_by(first, constraint, number, leave_after=leave_after)
        continued = reason is None
        if continued:
            text, reason, more = await said_by(second, constraint, number, text)
            tokens += more
    except InvalidRequest as error:
        seen.ends["refused"] += 1
        seen.wrong.append(f"{error.message}: {constraint.source}")
        return
    seen.tokens += tokens
    why = None if reason is FinishReason.LENGTH else invalid(constraint, text)
    what = "cut" if reason is FinishReason.LENGTH else "valid" if why is None else "invalid"
    if why is not None:
        seen.wrong.append(f"{why}: {text!r} under {constraint.source}")
    (seen.continued if continued else seen.ends)[what] += 1


def invalid(constraint: Constraint, text: str) -> str | None:
    """Return why an answer does not match, None if it does."""
    if constraint.kind is ConstraintKind.REGEX:
        return None if re.fullmatch(constraint.source, text) else "no match"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        jsonschema.Draft202012Validator(json.loads(constraint.source), format_checker=checker).validate(
            json.loads(text)
        )
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


async def every(tiers: tuple[Replica, Replica], constraints: list[Constraint], callers: int) -> Seen:
    seen, todo = Seen(), list(enumerate(constraints))

    async def caller() -> None:
        while todo:
            number, constraint = todo.pop()
            await one(tiers, constraint, number, seen)
            if number % 50 == 0:
                sys.stderr.write(f"{len(todo)} left; whole {dict(seen.ends)}, continued {dict(seen.continued)}\n")

    await asyncio.gather(*(caller() for _ in range(callers)))
    return seen


LONG = Constraint(
    ConstraintKind.JSON_SCHEMA,
    '{"type":"array","minItems":400,"items":{"type":"object","properties":{"name":{"type":"string","maxLength":24},'
    '"age":{"type":"integer","minimum":0,"maximum":120},"tags":{"type":"array","items":{"type":"string"}}},'
    '"required":["name","age","tags"],"additionalProperties":false}}',
)


async def decode_rate(replica: Replica, constraint: Constraint | None, batch: int, turn: int) -> float:
    """Return tokens a second between the first and the last of `batch` sequences side by side."""
    times: list[float] = []

    async def sequence(number: int) -> None:
        prompt = ChatPrompt((Message("user", f"Tell me about number {number}."),))
        sampling = SamplingParams(
            temperature=0.9,
            seed=turn * 100 + number,
            max_tokens=COST_TOKENS,
            min_tokens=COST_TOKENS,
            constraint=constraint,
        )
        request = InferenceRequest(f"c{number}", FAMILY, prompt, sampling, Objective(), 0, 0.0)
        async for chunk in replica.generate(request):
            times.extend([time.perf_counter()] * chunk.tokens)

    await asyncio.gather(*(sequence(number) for number in range(batch)))
    times.sort()
    begin = batch * 8  # behind the prompts
    return (len(times) - begin) / (times[-1] - times[begin])


async def cost(replica: Replica, batch: int) -> dict[str, float]:
    """Compare in turns, the order of each turn changed, and say what the median turn lost."""
    await decode_rate(replica, LONG, batch, 99)
    free, held, lost = [], [], []
    for turn in range(COST_ROUNDS):
        order: list[tuple[list[float], Constraint | None]] = [(free, None), (held, LONG)]
        for rates, constraint in order if turn % 2 else order[::-1]:
            rates.append(await decode_rate(replica, constraint, batch, turn))
        lost.append(1 - held[-1] / free[-1])
    return {
        "batch": batch,
        "free_tokens_per_s": round(statistics.median(free), 1),
        "constrained_tokens_per_s": round(statistics.median(held), 1),
        "overhead": round(statistics.median(lost), 4),
    }


@asynccontextmanager
async def both_tiers() -> AsyncIterator[tuple[Replica, Replica, int]]:
    """The cloud's engine, the device's model, and how many slots that has."""
    store = ModelStore()
    path = store.source_path(FAMILY)
    engine = TorchEngine(EngineConfig(weights=str(path), dtype="int8", max_running=16, max_context_tokens=1024))
    await engine.start()
    prior = SpeedPrior(100.0, 10.0, 0.1, "not measured")
    info = ReplicaInfo("cloud", "cloud", "cloud", False, FAMILY, FAMILY, 0, 1.0, 1024, prior)
    settings = LocalModels(variants=(EDGE_VARIANT,), preload=(EDGE_VARIANT,), intra_op_threads=1)
    profile, shelf = load_profiles()["generic-x86-cpu"], Shelf.open(settings)
    try:
        async with Lineup(lambda wanted: local_models(wanted, profile, shelf), lambda _: None) as lineup:
            await lineup.apply(settings)
            device = lineup.replicas[0]
            yield EngineReplica(engine, PromptEncoder.load(path), info), device, device.loop.slots
    finally:
        await engine.stop()


async def measure(schemas: int, regexes: int, *, only: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with both_tiers() as (cloud, device, slots):
        if only != "cost":
            made, patterns = Schemas(1), Regexes(2)
            constraints = [Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(made.next())) for _ in range(schemas)]
            constraints += [Constraint(ConstraintKind.REGEX, patterns.next()) for _ in range(regexes)]
            began = time.monotonic()
            seen = await every((cloud, device), constraints, 12)
            found["answers"] = {
                "schemas": schemas,
                "regexes": regexes,
                "whole": dict(seen.ends),
                "continued_elsewhere": dict(seen.continued),
                "tokens": seen.tokens,
                "took_s": round(time.monotonic() - began, 1),
                "wrong": seen.wrong[:20],
            }
        if only != "answers":
            found["cost"] = {"engine": await cost(cloud, BATCH), "device": await cost(device, slots)}
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
    answers = found.get("answers", {})
    if answers.get("wrong") or any("invalid" in answers.get(part, {}) for part in ("whole", "continued_elsewhere")):
        sys.exit("an answer was not valid, or a constraint was refused")


if __name__ == "__main__":
    main()
