"""How long one routing decision takes: look at every replica, filter, predict, choose.

    python benchmarks/router_decision.py [--json FILE] [--decisions N]

Median and p99 over single decisions, on one core, for 2 to 16 candidates and every policy. The target is 200 µs at 16.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from router.base.clock import MonotonicClock
from router.base.timers import Alarms
from router.dispatch.binding import Binder
from router.dispatch.candidates import PendingRequest, assess
from router.dispatch.telemetry import Telemetry
from router.policy.registry import POLICIES, load_policy
from router.signals.affinity import Affinity
from router.signals.health import HealthBook
from router.signals.latency import LatencyModel
from router.signals.length import LengthModel
from router.signals.link import Link
from router.signals.signals import Signals
from router.values.replica import Replica, ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import FinishReason, InferenceRequest, Objective, SamplingParams, TextPrompt, TokenChunk
from router.values.settings import BreakerSettings, RouterSettings

CANDIDATES = (2, 4, 8, 16)


class StandIn:
    """A replica that only knows its load: half of them busy, half of them remote, four rungs."""

    def __init__(self, index: int) -> None:
        remote = index % 2 == 1
        self.info = ReplicaInfo(
            replica_id=f"replica-{index}",
            endpoint="http://cloud:8700" if remote else "local",
            tier="cloud" if remote else "edge",
            remote=remote,
            family="smollm2-135m",
            variant=f"smollm2-135m-{index}",
            rung=index % 4,
            quality=1.0 - 0.1 * (index % 4),
            context_tokens=8192 if remote else 2048,
            prior=SpeedPrior(1000.0, 60.0),
        )
        self.link = Link(self.info.endpoint).snapshot() if remote else None
        busy = index % 4 < 2
        self._snapshot = ReplicaSnapshot(self.info, True, 8, running=8 if busy else 2, pending_decode_tokens=400)

    def snapshot(self) -> ReplicaSnapshot:
        return self._snapshot

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:  # noqa: ARG002
        yield TokenChunk("", 0, finish_reason=FinishReason.STOP)


def measure(candidates: int, policy_name: str, decisions: int) -> dict[str, object]:
    """Time `decisions` single decisions, each of a moment of its own: every replica is looked at anew."""
    clock, settings = MonotonicClock(), RouterSettings(policy=policy_name)
    replicas: list[Replica] = [StandIn(index) for index in range(candidates)]
    alarms = Alarms(clock)
    signals = Signals(
        LatencyModel(clock),
        LengthModel(128.0),
        HealthBook(BreakerSettings(), clock, lambda *_: None),
        affinity=Affinity(clock),
    )
    binder = Binder(settings, signals, clock, alarms, Telemetry())
    binder.replicas = {replica.info.replica_id: replica for replica in replicas}
    request = InferenceRequest(
        request_id="r",
        model="smollm2-135m",
        prompt=TextPrompt(""),
        sampling=SamplingParams(max_tokens=128),
        objective=Objective(ttft_s=0.5, deadline_s=20.0),
        prompt_tokens=200,
        accepted_at_s=clock.now_s(),
        prompt_bytes=1000,
    )
    length = signals.lengths.watch(request, request.model)
    asked = PendingRequest(request, frozenset(), clock.now_s() + 3600, length)
    policy = load_policy(policy_name)
    took_us = []
    gc.disable()
    for _ in range(decisions):
        binder.changed()
        began = time.perf_counter_ns()
        situation, _ = assess(asked, binder.look())
        assert situation is not None
        policy.decide(situation)
        took_us.append((time.perf_counter_ns() - began) / 1000)
    gc.enable()
    took_us.sort()
    return {
        "policy": policy_name,
        "candidates": candidates,
        "median_us": round(statistics.median(took_us), 1),
        "p99_us": round(took_us[int(len(took_us) * 0.99)], 1),
    }


def main() -> None:
    """Print the table, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--decisions", type=int, default=5000)
    arguments = parser.parse_args()
    rows = [measure(n, policy, arguments.decisions) for policy in POLICIES for n in CANDIDATES]
    print(f"{'policy':<22}{'candidates':>11}{'median µs':>11}{'p99 µs':>9}")
    for row in rows:
        print(f"{row['policy']:<22}{row['candidates']:>11}{row['median_us']:>11}{row['p99_us']:>9}")
    if arguments.json is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "processor": _processor()}
        arguments.json.write_text(json.dumps({"hardware": machine, "rows": rows}, indent=2) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
