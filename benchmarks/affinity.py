"""How much of what replicas could find in their prefix caches they do find: 4 replicas of one model, chats of 5 turns.

    python -m benchmarks affinity -- [--policy NAME …] [--chats N] [--turns N] [--seeds N]

The very dispatcher that serves, in the simulator: 4 devices that share nothing, each with continuous batching and a
prefix cache of whole blocks, the longest unused forgotten first, in the room that its running sequences leave. Chats
begin over some minutes, one of four system prompts stands before each, and a turn follows the answer before it after a
while of reading. No caller names a session. `cacheable` is what one cache that forgets nothing and serves all four
replicas would find; `cached` is the share of it that was found. With the smaller room the caches hold a part of the
chats that go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from router.simulation.prefix_cache import PrefixCache
from router.simulation.run import simulate
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, NoiseSpec, RungSpec, World
from router.values.settings import RouterSettings

POLICIES = ("slo-utility", "min-completion", "least-load", "peak-ewma", "random")
ROOMS_TOKENS = (131_072, 32_768)
REPLICAS = 4
SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 256
MESSAGE_TOKENS, ANSWER_TOKENS = 90.0, 140.0  # medians
READING_S = 20.0  # mean, after 10
BEGIN_OVER_S = 240.0


def world(room_tokens: int) -> World:
    """4 equal replicas: about an 8B model on a GPU of 24 GB."""
    rung = RungSpec(
        variant="chat-8b",
        quality=1.0,
        prefill_tokens_per_s=3_000.0,
        prefill_fixed_ms=15.0,
        step_ms=22.0,
        batch_slope=0.04,
        context_tokens=16_384,
    )
    devices = tuple(
        DeviceSpec(
            name=f"gpu-{index}", endpoint=f"http://gpu-{index}", slots=16, rungs=(rung,), kv_tokens=room_tokens,
            decode_share=0.5, prefill_share=0.8,
        )
        for index in range(REPLICAS)
    )  # fmt: skip
    return World(devices=devices, family="chat", noise=NoiseSpec(sigma=0.15, prior_error_sigma=0.2))


def conversations(chats: int, turns: int, seed: int) -> list[SimRequest]:
    """Chats as requests in order of arrival: each turn's prompt is all that was said before, and a message."""
    chance = np.random.default_rng([seed, 5])
    ids = iter(range(10**9))  # no two tokens are alike unless they are the same place of the same text
    systems = [tuple(next(ids) for _ in range(SYSTEM_TOKENS)) for _ in range(SYSTEM_PROMPTS)]
    requests = []
    for _ in range(chats):
        said = systems[int(chance.integers(SYSTEM_PROMPTS))]
        at_s = float(chance.uniform(0.0, BEGIN_OVER_S))
        for _ in range(turns):
            message = round(MESSAGE_TOKENS * float(chance.lognormal(0.0, 0.6))) + 4
            answer = round(ANSWER_TOKENS * float(chance.lognormal(0.0, 0.5))) + 4
            said = (*said, *(next(ids) for _ in range(message)))
            answer_ids = tuple(next(ids) for _ in range(answer))
            requests.append(
                SimRequest(
                    arrival_s=at_s,
                    prompt_tokens=len(said),
                    answer_tokens=answer,
                    max_tokens=1024,
                    token_ids=said,
                    answer_ids=answer_ids,
                )
            )
            said += answer_ids
            at_s += answer * 0.06 + 10.0 + float(chance.exponential(READING_S))
    return sorted(requests, key=lambda request: request.arrival_s)


def cacheable_tokens(requests: Sequence[SimRequest]) -> int:
    """Tokens of all prompts that one cache without bounds would find."""
    cache, found = PrefixCache(10**12), 0
    for request in requests:
        ids = request.token_ids or ()
        found += cache.find("", ids)
        cache.keep("", (*ids, *request.answer_ids))
    return found


def measure(policy: str, room_tokens: int, requests: Sequence[SimRequest], seed: int) -> dict[str, float]:
    """Simulate one policy; returns shares and times."""
    rows = simulate(world(room_tokens), requests, RouterSettings(policy=policy), seed=seed).rows
    whole = [row for row in rows if row.whole]
    ttfts_s = sorted(row.ttft_s for row in whole if row.ttft_s is not None)
    return {
        "answered": len(whole) / len(rows),
        "cached": sum(row.cached_tokens or 0 for row in rows) / cacheable_tokens(requests),
        "ttft_p50_ms": 1e3 * statistics.median(ttfts_s),
        "ttft_p95_ms": 1e3 * ttfts_s[int(0.95 * len(ttfts_s))],
    }


def main() -> None:
    """Print the table, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--policy", nargs="+", default=[*POLICIES])
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    table = []
    print(f"{'room':>9}  {'policy':<16}{'answered':>10}{'cached':>9}{'TTFT p50':>11}{'p95':>9}")
    for room_tokens in ROOMS_TOKENS:
        for policy in arguments.policy:
            measured = [
                measure(policy, room_tokens, conversations(arguments.chats, arguments.turns, seed), seed)
                for seed in range(arguments.seeds)
            ]
            row = {name: round(statistics.mean(m[name] for m in measured), 4) for name in measured[0]}
            table.append({"room_tokens": room_tokens, "policy": policy, **row})
            print(
                f"{room_tokens:>9}  {policy:<16}{row['answered']:>10.1%}{row['cached']:>9.1%}"
                f"{row['ttft_p50_ms']:>8.0f} ms{row['ttft_p95_ms']:>6.0f} ms",
                flush=True,
            )
    if arguments.json is not None:
        setup = {"replicas": REPLICAS, **{name: getattr(arguments, name) for name in ("chats", "turns", "seeds")}}
        arguments.json.write_text(json.dumps({**setup, "rows": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
