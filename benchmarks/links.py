"""Goodput over mobile links: the hybrid against the device alone and the cloud alone, on LTE, 3G and a made-up uplink.

    python -m benchmarks links -- [--lte UP DOWN] [--hsdpa CSV NAME] [--rate R] [--step-s S] [--blocks N]

The cloud tier runs in a network namespace whose link follows a trace (tbf, half-second steps); a relay before it adds
delay, jitter and cuts. Where namespaces cannot be made (no root, no Linux), the relay shapes the bandwidth too, and the
result says so. Only a synthetic trace comes with Overspill; others are given by path, since their licences do not let
it ship them:

- `--lte UP DOWN`: packet traces of mahimahi (https://github.com/ravinet/mahimahi, `traces/`, e.g. ATT-LTE-driving.up
  and .down), plain or gzipped.
- `--hsdpa CSV NAME`: `trace,t_s,mbps` with a trace of that name, e.g. of the Norwegian 3G commutes
  (http://home.ifi.uio.no/paalh/dataset/hsdpa-tcp-logs/). They are downlinks: a share of them stands in for the uplink.

The device, the cloud and the requests are those of `benchmarks.hybrid`; the cloud alone is asked over the same link.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.hybrid import HEADER, TRACE, WARM_UP_REQUESTS, block_row, line, order_of, summary
from benchmarks.hybrid import Plan as Hybrid
from benchmarks.live.client import Target, replay
from benchmarks.live.cpu_share import CpuShare
from benchmarks.live.namespace import STEP_S, THERE, Namespace, possible
from benchmarks.live.relay import LinkShape, Relay
from benchmarks.live.running import run
from benchmarks.live.tiers import TierOptions, Tiers
from benchmarks.live.workload import Promises, Scale, asks_of, rows_of
from benchmarks.under_load import OtherWork
from router.simulation.network import Bandwidth, load_bandwidth
from router.values.settings import RouterSettings

SYSTEMS = ("hybrid", "edge-only", "cloud-only")
HSDPA_UP_SHARE = 0.25
SEED = 20261121


@dataclass(frozen=True)
class Plan:
    """What is measured: each link, `blocks` times, for `step_s` seconds by every system; as in `benchmarks.hybrid`."""

    rate_rps: float = 0.9
    edge_share: float = Hybrid.edge_share
    blocks: int = 1
    step_s: float = 45.0

    @property
    def requests(self) -> int:
        return max(2, round(self.rate_rps * self.step_s))


def synthetic(seconds: int = 120, seed: int = SEED) -> LinkShape:
    """Return a link as a car meets it: a rate that wanders (log-normal, a memory of some 5 s), fades, and two cuts.

    Mean about 2 Mbit/s up, three times that down; one second in twenty begins a fade to a tenth.
    """
    dice = random.Random(seed)  # noqa: S311
    level, fade, bits = 0.0, 0, [0.0]
    for _ in range(seconds):
        level = 0.8 * level + 0.6 * dice.gauss(0.0, 0.7)
        fade = dice.randrange(1, 4) if fade == 0 and dice.random() < 0.05 else max(0, fade - 1)
        bits.append(bits[-1] + 2e6 * math.exp(level - 0.3) * (0.1 if fade else 1.0))
    times_s = [float(at) for at in range(seconds + 1)]
    up, down = Bandwidth(times_s, bits), Bandwidth(times_s, [3.0 * value for value in bits])
    return LinkShape("synthetic", up, down, 0.07, 0.3, ((12.0, 15.0), (30.0, 32.0)), "built in")


def shapes_of(arguments: argparse.Namespace) -> list[LinkShape]:
    """Return the links that were asked for, the built-in one last."""
    shapes = []
    if arguments.lte:
        up, down = (load_bandwidth(Path(path), "", "mbps") for path in arguments.lte)
        shapes.append(LinkShape("lte", up, down, 0.06, 0.2, (), f"mahimahi {Path(arguments.lte[0]).name}"))
    if arguments.hsdpa:
        path, name = arguments.hsdpa
        down = load_bandwidth(Path(path), name, "mbps")
        source = f"{Path(path).name} {name}; up: {HSDPA_UP_SHARE:g} of it"
        shapes.append(LinkShape("3g", down.scaled(HSDPA_UP_SHARE), down, 0.11, 0.3, (), source))
    return [*shapes, synthetic()]


@dataclass
class Site:
    """The tiers with a link between them that `under` sets."""

    tiers: Tiers
    namespace: Namespace | None
    relay: Relay

    @contextlib.asynccontextmanager
    async def under(self, shape: LinkShape) -> AsyncIterator[None]:
        """Let the link follow `shape` from its beginning; full rate afterwards."""
        self.relay.follow(shape)
        if self.namespace is None:
            try:
                yield
            finally:
                self.relay.follow(None)
            return
        following = asyncio.ensure_future(self.namespace.follow(shape))
        try:
            yield
            if following.done():
                following.result()  # the link did not follow its trace: no figure of it counts
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            self.relay.follow(None)
            self.namespace.full_rate()

    def targets(self) -> dict[str, Target]:
        """Whom to ask, by system; the cloud over the link."""
        over_link = replace(self.tiers.cloud_only, url=f"http://127.0.0.1:{self.relay.port}")
        return {target.name: target for target in (self.tiers.hybrid, self.tiers.edge_only, over_link)}


@contextlib.asynccontextmanager
async def site(folder: Path, namespace: Namespace | None, device: CpuShare) -> AsyncIterator[Site]:
    """Start the tiers with the link between them.

    Args:
        device: the device's share of its core.
    """
    env = {} if namespace is None else {"OVERSPILL_CLOUD__SERVER__HOST": THERE}
    cloud_prefix = () if namespace is None else namespace.prefix
    options = TierOptions(edge_prefix=device.prefix, cloud_prefix=cloud_prefix, env=env)
    tiers = Tiers(folder, options)
    host = "127.0.0.1" if namespace is None else THERE
    tiers.stack.cloud_url = f"http://{host}:{tiers.stack.cloud_port}"
    async with Relay(host, tiers.stack.cloud_port, shape_bandwidth=namespace is None) as relay:
        tiers.stack.edge.env["OVERSPILL_EDGE__UPSTREAM__URL"] = f"http://127.0.0.1:{relay.port}"
        async with tiers:
            yield Site(tiers, namespace, relay)


async def measure(plan: Plan, shapes: Sequence[LinkShape]) -> dict[str, Any]:
    """Run every link by every system in turns."""
    why = possible()
    if why:
        print(f"no namespaces: {why}; the relay shapes all of the link", flush=True)
    scale, promises = Scale(rate_rps=plan.rate_rps), Promises()
    rows: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overspill-links-")))
        namespace = None if why else await stack.enter_async_context(Namespace())
        device = await stack.enter_async_context(CpuShare(plan.edge_share))
        here = await stack.enter_async_context(site(folder, namespace, device))
        targets, tiers = here.targets(), here.tiers
        quality = await tiers.qualities()
        for number, name in enumerate(SYSTEMS):
            warm = rows_of(TRACE, WARM_UP_REQUESTS, 100 + number, scale)
            await replay(targets[name], asks_of(warm, 100 + number, name, promises))
        await tiers.settle()
        other_work = OtherWork([tiers.stack.edge.pid, tiers.stack.cloud.pid])
        for block in range(plan.blocks):
            trace = rows_of(TRACE, plan.requests, block, scale)
            for shape in shapes:
                for name in order_of(SYSTEMS, block):
                    before = await tiers.cloud_tokens()
                    async with here.under(shape):
                        seen = await replay(targets[name], asks_of(trace, block, f"{name} {shape.name}", promises))
                    await tiers.settle()
                    row = {**block_row(name, block, seen, quality), "link": shape.name}
                    row["cloud_tokens"] = await tiers.cloud_tokens() - before
                    rows.append(row)
                    print(line(summary(name, [row], plan.step_s), shape.name), flush=True)
        other_share = other_work.share()
    return {
        "model": "smollm2-135m",
        "trace": TRACE,
        "policy": RouterSettings().policy,
        "plan": asdict(plan),
        "scale": asdict(scale),
        "promises": asdict(promises),
        "edge_share_of_core": plan.edge_share if device.limited else 1.0,
        "bandwidth_by": "relay" if why else f"tbf in a network namespace, steps of {STEP_S:g} s",
        "links": [_described(shape, plan.step_s) for shape in shapes],
        "other_work_share": other_share,
        "systems": [
            {"link": shape.name, **summary(name, [r for r in rows if r["link"] == shape.name], plan.step_s)}
            for shape in shapes
            for name in SYSTEMS
        ],
        "rows": [{key: value for key, value in row.items() if key != "ttft_s"} for row in rows],
    }


def _described(shape: LinkShape, step_s: float) -> dict[str, Any]:
    return {
        "link": shape.name,
        "source": shape.source,
        "up_mbps": round(shape.up.bits_until(step_s) / step_s / 1e6, 3),
        "down_mbps": round(shape.down.bits_until(step_s) / step_s / 1e6, 3),
        "rtt_ms": shape.rtt_s * 1e3,
        "jitter": shape.jitter,
        "cuts_s": shape.cuts_s,
    }


def main() -> None:
    """Print the table; write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lte", nargs=2, metavar=("UP", "DOWN"))
    parser.add_argument("--hsdpa", nargs=2, metavar=("CSV", "NAME"))
    parser.add_argument("--rate", type=float, default=Plan.rate_rps)
    parser.add_argument("--edge-share", type=float, default=Plan.edge_share)
    parser.add_argument("--blocks", type=int, default=Plan.blocks)
    parser.add_argument("--step-s", type=float, default=Plan.step_s)
    arguments = parser.parse_args()
    plan = Plan(arguments.rate, arguments.edge_share, arguments.blocks, arguments.step_s)
    shapes = shapes_of(arguments)
    print(HEADER, flush=True)
    limit_s = 300.0 + plan.blocks * len(shapes) * len(SYSTEMS) * (plan.step_s + 90.0)
    result = run(measure(plan, shapes), limit_s)
    _print_totals(result["systems"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def _print_totals(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        print(line(row, f"= {row['link']}"))


if __name__ == "__main__":
    main()
