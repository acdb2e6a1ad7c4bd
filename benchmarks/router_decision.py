"""How long one routing decision takes: look at the replicas, filter, predict, choose.

    python benchmarks/router_decision.py [--json FILE] [--decisions N] [--policy NAME …]

Median and p99 over single decisions, each about a request that has just come, on one core, for 2 to 16 candidates and
every policy; and for 128 and 1,000 replicas of four rungs, of which a decision looks at two of each rung that it draws.
Before each of them something has changed on one device, as after a request that was sent or has ended; what nobody
tells of is read again after a millisecond, as always, and that is what p99 holds. `anew` is the median where every
replica has to be read (of many: those that are looked at). On most of these devices no slot is free. Where `running` is
not 0, all have free slots, and each replica runs so many answers under deadlines, of which each decision finds out what
they stand to lose (`router.signals.at_stake`). The target is a median of 50 µs and a p99 of 250 µs at 8 candidates.
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

from router.base.alarms import Alarms
from router.base.build import build_of
from router.base.clock import MonotonicClock
from router.dispatch.assessment.candidates import assess
from router.dispatch.assessment.pending import PendingRequest
from router.dispatch.binding.binder import Binder
from router.dispatch.records.telemetry import Telemetry
from router.policy.registry import POLICIES, load_policy
from router.signals.affinity import Affinity
from router.signals.health import HealthBook
from router.signals.in_flight import Attempt
from router.signals.latency import LatencyModel
from router.signals.length import LengthModel
from router.signals.link import Link
from router.signals.signals import Signals
from router.values.choice import Choice
from router.values.chunk import FinishReason, TokenChunk
from router.values.prediction import TtftFeatures
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import BreakerSettings, RouterSettings
from router.values.situation import Candidate

CANDIDATES = (2, 4, 8, 16)
MANY = (128, 1_000)
MANY_FOR = ("slo-utility", "least-load")  # policies that are measured with many
RUNNING = 2  # answers on each of 8 replicas, two of which share a device
BLOCK = 100  # decisions


class StandIn:
    """A replica that only knows its load: half of them busy, half of them remote, four rungs, two to a device.

    Args:
        running: answers of this tier on each of them, where nothing else runs; 0 for half of them busy with others'.
    """

    def __init__(self, index: int, *, many: bool, running: int) -> None:
        remote = index % 2 == 1
        self.info = ReplicaInfo(
            replica_id=f"replica-{index}",
            endpoint="http://cloud:8700" if remote else "local",
            tier="cloud" if remote else "edge",
            remote=remote,
            family="smollm2-135m",
            variant=f"smollm2-135m-{index % 4 if many else index}",
            rung=index % 4,
            quality=1.0 - 0.1 * (index % 4),
            context_tokens=8192 if remote else 2048,
            prior=SpeedPrior(1000.0, 60.0),
            device=f"device-{index // 4}-{index % 2}",
        )
        self.link = Link(self.info.endpoint).snapshot() if remote else None
        self.running = running or (8 if index % 4 < 2 else 2)

    def move(self) -> None:
        """A request ends, or the next one has come."""
        self.running += -1 if self.running in {2, 8} else 1

    def answer(self, asked: PendingRequest, candidate: Candidate, now_s: float) -> Attempt:
        """Return an answer of which 30 tokens are there."""
        request = asked.request
        attempt = Attempt(
            self,
            Choice(candidate, "best-quality", degraded=False),
            now_s,
            TtftFeatures(request.prompt_tokens, 0.0),
            prompt_tokens=request.prompt_tokens,
            expected_tokens=asked.expected_tokens(self.info.context_tokens),
            length=asked.length.curve,
            objective=request.objective,
        )
        attempt.opened, attempt.first_at_s, attempt.ends_s = True, now_s, now_s + 60.0
        attempt.came(30, now_s)
        return attempt

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.info, True, 8, running=self.running, pending_decode_tokens=400)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:  # noqa: ARG002
        yield TokenChunk("", 0, finish_reason=FinishReason.STOP)


def measure(candidates: int, policy_name: str, decisions: int, running: int = 0) -> dict[str, object]:
    """Time `decisions` single decisions, and so many for which every replica is read anew.

    Args:
        running: answers on each replica; see the module.
    """
    clock, settings = MonotonicClock(), RouterSettings(policy=policy_name)
    replicas = [StandIn(index, many=candidates in MANY, running=running) for index in range(candidates)]
    alarms = Alarms(clock)
    signals = Signals(
        LatencyModel(clock),
        LengthModel(128.0),
        HealthBook(BreakerSettings(), clock, lambda *_: None),
        affinity=Affinity(clock),
    )
    binder = Binder(settings, signals, clock, alarms, Telemetry(), seed=0)
    binder.pool.set_replicas({replica.info.replica_id: replica for replica in replicas})
    policy = load_policy(policy_name)

    def newcomer(prompt_tokens: int) -> PendingRequest:
        now_s = clock.now_s()
        request = InferenceRequest(
            request_id="r",
            model="smollm2-135m",
            prompt=TextPrompt(""),
            sampling=SamplingParams(max_tokens=128),
            objective=Objective(ttft_s=0.5, deadline_s=20.0),
            prompt_tokens=prompt_tokens,
            accepted_at_s=now_s,
            prompt_bytes=5 * prompt_tokens,
        )
        return PendingRequest(request, {}, now_s + 30.0, signals.lengths.watch(request, request.model))

    def took_us(index: int, *, anew: bool) -> float:
        asked, moved = newcomer(150 + index), replicas[index % candidates]
        moved.move()
        binder.pool.changed(None if anew else moved.info.device_key)
        began = time.perf_counter_ns()
        binder.pool.begin_moment()
        situation, _ = assess(asked, binder.pool.look())
        assert situation is not None
        policy.decide(situation)
        return (time.perf_counter_ns() - began) / 1000

    def let_answer() -> None:
        for replica in replicas:
            for _ in range(running):
                asked = newcomer(150)
                situation, _ = assess(asked, binder.pool.look())
                assert situation is not None
                on_it = [c for c in situation.candidates if c.info is replica.info]
                signals.in_flight.begin(replica.answer(asked, on_it[0], clock.now_s()))
                binder.pool.changed()

    let_answer()
    gc.disable()
    one_us, anew_us = [], []
    for _ in range(max(1, decisions // BLOCK)):  # in turn: whatever else the machine does slows both
        one_us += [took_us(index, anew=False) for index in range(BLOCK)]
        anew_us += [took_us(index, anew=True) for index in range(BLOCK)]
    gc.enable()
    one_us.sort()
    return {
        "policy": policy_name,
        "candidates": candidates,
        "running": running,
        "median_us": round(statistics.median(one_us), 1),
        "p99_us": round(one_us[int(len(one_us) * 0.99)], 1),
        "anew_us": round(statistics.median(anew_us), 1),
    }


def cases(policy: str) -> list[tuple[int, int]]:
    """Return the numbers of candidates, and of answers that run on each, that a policy is measured with."""
    found = [(candidates, 0) for candidates in ((*CANDIDATES, *MANY) if policy in MANY_FOR else CANDIDATES)]
    return [*found, (8, RUNNING)] if policy == "slo-utility" else found


def main() -> None:
    """Print the table, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--policy", nargs="+", default=[*POLICIES], choices=[*POLICIES])
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    arguments = parser.parse_args()
    rows = [
        measure(candidates, policy, arguments.decisions, running)
        for policy in arguments.policy
        for candidates, running in cases(policy)
    ]
    print(f"router {build_of().name}")
    print(f"{'policy':<22}{'candidates':>11}{'running':>9}{'median µs':>11}{'p99 µs':>9}{'anew µs':>9}")
    for row in rows:
        print("{policy:<22}{candidates:>11}{running:>9}{median_us:>11}{p99_us:>9}{anew_us:>9}".format(**row))
    if arguments.json is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "processor": _processor()}
        told = {"hardware": machine, "router": build_of().name, "note": arguments.note, "rows": rows}
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
