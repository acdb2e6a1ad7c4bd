"""What the hybrid is worth: device and cloud behind Overspill, against each alone and against LiteLLM over both.

    python -m benchmarks hybrid              # the JSON and the picture of the README, in benchmarks/results/
    python -m benchmarks hybrid -- [--load L | --rate R] [--blocks N] [--block-s S] [--systems NAME …]

A real edge agent and a real cloud tier, on a core each where there are two, serve the same slices of the Azure
conversation trace (`benchmarks/live/workload.py` says how lengths are scaled and imposed): by turns, in several blocks,
so that what else the machine does meets all of them. The device has a share of its core (`--edge-share`), as its INT8
engine would else be several times as fast as the cloud's float32 one, and no cloud were worth anything. Requests come
at `--load` times the rate at which the cloud alone answers callers who always wait for it, which is measured first: so
the picture means the same on any machine.

- `hybrid`: the edge agent with the cloud upstream, default policy.
- `edge-only`: the same agent, every request `local-only`. `cloud-only`: straight to the cloud tier.
- `litellm`: LiteLLM's proxy, latency-based routing, each tier the other's fallback (`benchmarks/live/litellm.py`).

Goodput counts whole answers that kept every time that was asked for; what was refused, cut or late is a miss. Cloud
tokens are those that the cloud's engines generated, for cut answers too. LiteLLM's proxy and this client have no core
of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks._stamp import machine
from benchmarks.live.client import Seen, Target, in_turn, replay
from benchmarks.live.cpu_share import CpuShare
from benchmarks.live.litellm import VERSION, LiteLlm, install
from benchmarks.live.running import run
from benchmarks.live.tiers import TierOptions, Tiers
from benchmarks.live.workload import Promises, Scale, asks_of, rows_of
from benchmarks.under_load import OtherWork, percentile
from router.values.settings import RouterSettings

SYSTEMS = ("hybrid", "edge-only", "cloud-only", "litellm")
TRACE = "azure-conv"
OUTCOMES = ("kept", "late", "cut", "refused", "failed")
WARM_UP_REQUESTS = 16
CALLERS = 8
PROBED_REQUESTS = 64
PROBED_SLICE = 200


@dataclass(frozen=True)
class Plan:
    """What is measured: `blocks` slices of the trace of about `block_s` seconds, each by every system.

    Attributes:
        load: arrivals, in units of what the cloud alone can answer.
        rate_rps: arrivals a second; `None`: by the load.
        edge_share: of a core, that the device has.
    """

    systems: tuple[str, ...] = SYSTEMS
    load: float = 1.25
    rate_rps: float | None = None
    edge_share: float = 0.4
    blocks: int = 3
    block_s: float = 60.0

    @property
    def limit_s(self) -> float:
        """Longest time for all of it: the tiers' start, and each block with the time its last answers may take."""
        return 900.0 + len(self.systems) * self.blocks * (self.block_s + 90.0)


def order_of(systems: Sequence[str], block: int) -> list[str]:
    """Return who comes when in a block: each system is first, second … about equally often."""
    turn = block % len(systems)
    return [*systems[turn:], *systems[:turn]]


def block_row(system: str, block: int, seen: Sequence[Seen], quality: Mapping[str, float]) -> dict[str, Any]:
    """Count one block of one system; `latencies_s` are first tokens of whatever was answered."""
    outcomes = Counter(one.outcome for one in seen)
    return {
        "system": system,
        "block": block,
        "requests": len(seen),
        **{outcome: outcomes[outcome] for outcome in OUTCOMES},
        "quality": round(sum(quality.get(one.variant, 0.0) for one in seen if one.kept), 3),
        "served_by": dict(Counter(one.variant for one in seen if one.first_s is not None)),
        "ttft_s": [round(one.first_s, 4) for one in seen if one.first_s is not None],
        "sent_late_s": round(max(one.sent_late_s for one in seen), 3),
        "answers": [one.row() for one in seen],
        "errors": sorted({one.error for one in seen if one.outcome == "failed"})[:3],
    }


def summary(system: str, rows: Sequence[Mapping[str, Any]], block_s: float) -> dict[str, Any]:
    """Pool the blocks of one system; `goodput_low` and `_high` are its worst and best block."""
    mine = [row for row in rows if row["system"] == system]
    total = {name: sum(row[name] for row in mine) for name in ("requests", "quality", "cloud_tokens", *OUTCOMES)}
    ttfts_ms = [1e3 * ttft_s for row in mine for ttft_s in row["ttft_s"]]
    span_s = block_s * len(mine)
    served: Counter[str] = Counter()
    for row in mine:
        served.update(row["served_by"])
    return {
        "system": system,
        "requests": total["requests"],
        "goodput_per_s": round(total["kept"] / span_s, 3),
        "goodput_low": round(min(row["kept"] for row in mine) / block_s, 3),
        "goodput_high": round(max(row["kept"] for row in mine) / block_s, 3),
        "quality_goodput_per_s": round(total["quality"] / span_s, 3),
        "quality_of_kept": round(total["quality"] / total["kept"], 3) if total["kept"] else None,
        "ttft_ms_p50": percentile(ttfts_ms, 50),
        "ttft_ms_p95": percentile(ttfts_ms, 95),
        "cloud_tokens": total["cloud_tokens"],
        "cloud_tokens_per_kept": round(total["cloud_tokens"] / max(total["kept"], 1), 1),
        "shares": {name: round(total[name] / total["requests"], 4) for name in OUTCOMES},
        "served_by": dict(served),
    }


async def measure(plan: Plan) -> dict[str, Any]:
    """Start everything, run every block by every system in turns, and return rows and summaries."""
    scale, promises = Scale(), Promises()
    rows: list[dict[str, Any]] = []
    command = install() if "litellm" in plan.systems else None
    with tempfile.TemporaryDirectory(prefix="overspill-hybrid-") as folder:
        async with (
            CpuShare(plan.edge_share) as device,
            Tiers(Path(folder), TierOptions(edge_prefix=device.prefix)) as tiers,
            _targets(Path(folder), tiers, command) as targets,
        ):
            quality = await tiers.qualities()
            for number, target in enumerate(targets[name] for name in plan.systems):  # nobody's first request counts
                warm = rows_of(TRACE, WARM_UP_REQUESTS, 100 + number, scale)
                await replay(target, asks_of(warm, 100 + number, target.name, promises))
            await tiers.settle()
            cloud_rps = await _answers_per_s(tiers.cloud_only, scale)
            scale = replace(scale, rate_rps=plan.load * cloud_rps if plan.rate_rps is None else plan.rate_rps)
            requests = max(2, round(scale.rate_rps * plan.block_s))
            print(f"the cloud alone answers {cloud_rps:.2f} a second; {scale.rate_rps:.2f} are asked for", flush=True)
            await tiers.settle()
            other_work = OtherWork([tiers.stack.edge.pid, tiers.stack.cloud.pid])
            for block in range(plan.blocks):
                trace = rows_of(TRACE, requests, block, scale)
                for name in order_of(plan.systems, block):
                    before = await tiers.cloud_tokens()
                    seen = await replay(targets[name], asks_of(trace, block, name, promises))
                    await tiers.settle()
                    await tiers.identify(seen)
                    row = block_row(name, block, seen, quality)
                    row["cloud_tokens"] = await tiers.cloud_tokens() - before
                    rows.append(row)
                    print(line(summary(name, [row], plan.block_s), f"block {block + 1}"), flush=True)
            other_share = other_work.share()
            cores, dtype, share = tiers.cores, tiers.dtype, plan.edge_share if device.limited else 1.0
    return {
        "model": "smollm2-135m",
        "trace": TRACE,
        "policy": RouterSettings().policy,
        "plan": {"rate_rps": round(scale.rate_rps, 3), "blocks": plan.blocks, "block_s": plan.block_s},
        "cloud_alone_rps": round(cloud_rps, 3),
        "load": round(scale.rate_rps / cloud_rps, 3),
        "scale": asdict(scale),
        "promises": asdict(promises),
        "edge_share_of_core": share,
        "cores": {"edge": cores[0], "cloud": cores[1]},
        "cloud_dtype": dtype,
        "litellm": VERSION if command is not None else None,
        "quality": quality,
        "other_work_share": other_share,
        "systems": [summary(name, rows, plan.block_s) for name in plan.systems],
        "rows": [{key: value for key, value in row.items() if key != "ttft_s"} for row in rows],
    }


async def _answers_per_s(target: Target, scale: Scale) -> float:
    """Return how many of the workload's requests a system answers a second while `CALLERS` always wait for it."""
    asks = asks_of(rows_of(TRACE, PROBED_REQUESTS, PROBED_SLICE, scale), PROBED_SLICE, "probe", Promises())
    began_s = time.monotonic()
    seen = await in_turn(target, [replace(ask, headers={}) for ask in asks], CALLERS)
    took_s = time.monotonic() - began_s
    lost = [one for one in seen if one.outcome in {"refused", "failed"}]
    if lost:
        errors = sorted({one.error for one in lost})[:3]
        raise SystemExit(f"{target.name} lost {len(lost)} of {len(seen)} requests without a promise: {errors}")
    return len(seen) / took_s


@contextlib.asynccontextmanager
async def _targets(folder: Path, tiers: Tiers, litellm: Path | None) -> AsyncIterator[dict[str, Target]]:
    """Whom to ask, by system; LiteLLM's proxy runs while it is needed."""
    targets = {target.name: target for target in (tiers.hybrid, tiers.edge_only, tiers.cloud_only)}
    if litellm is None:
        yield targets
        return
    async with LiteLlm(folder, tiers.stack, litellm) as proxy:
        yield {**targets, proxy.name: proxy}


HEADER = (
    f"{'system':<12}{'':<9}{'n':>5}{'goodput/s':>11}{'quality/s':>11}{'TTFT p50':>10}{'p95, ms':>9}{'cloud tok':>11}"
    + "".join(f"{outcome:>9}" for outcome in OUTCOMES)
)


def line(row: Mapping[str, Any], note: str = "all") -> str:
    """One row on a terminal."""
    times = "".join(f"{'-' if row[key] is None else round(row[key]):>{width}}" for key, width in _TIMES)
    shares = "".join(f"{row['shares'][outcome]:>9.0%}" for outcome in OUTCOMES)
    goodput = f"{row['goodput_per_s']:>11.3f}{row['quality_goodput_per_s']:>11.3f}"
    return f"{row['system']:<12}{note:<9}{row['requests']:>5}{goodput}{times}{row['cloud_tokens']:>11}{shares}"


_TIMES = (("ttft_ms_p50", 10), ("ttft_ms_p95", 9))


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw goodput, quality, first token and cloud tokens of each system, as SVG; readable on white and on black."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "overspill", "font.family": ["sans-serif"], "font.size": 10}
    )
    mpl.rcParams.update(
        dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    )
    from matplotlib import pyplot as plt

    systems = result["systems"]
    names = [LABELS.get(row["system"], row["system"]) for row in systems]
    colours = [COLOURS.get(row["system"], INK) for row in systems]
    figure, panels = plt.subplots(1, len(PANELS), figsize=(10.4, 2.9), constrained_layout=True, sharey=True)
    places = range(len(systems))
    for axis, (key, title, form) in zip(panels, PANELS, strict=True):
        values = [row[key] or 0.0 for row in systems]
        axis.barh(places, values, color=colours, height=0.62)
        for place, value in zip(places, values, strict=True):
            axis.annotate(form.format(value), (value, place), (4, 0), textcoords="offset points", va="center")
        axis.set_title(title, fontsize=10, loc="left")
        axis.margins(x=0.22)
        axis.xaxis.set_visible(False)
        for side in ("top", "right", "bottom"):
            axis.spines[side].set_visible(False)
        axis.tick_params(left=False)
    for place, row in zip(places, systems, strict=True):
        panels[0].plot([row["goodput_low"], row["goodput_high"]], [place + 0.38] * 2, color=INK, lw=1.2)
    panels[0].set_yticks(list(places), names)
    panels[0].invert_yaxis()
    day = datetime.now(timezone.utc).date().isoformat()
    plan = result["plan"]
    figure.supxlabel(
        f"{result['model']}, Azure conversation trace at {result['load']:.3g} times what the cloud alone can answer "
        f"({plan['rate_rps']:.2f}/s), {plan['blocks']} × {plan['block_s']:g} s each, "
        "by turns (thin line: worst to best of them)\n"
        f"{machine()['cpu']}: the cloud has one, the device {result['edge_share_of_core']:g} of the other; {day}",
        fontsize=7.5,
    )
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None}, transparent=True)
    plt.close(figure)


INK = "#7d8590"  # on white 3.7 : 1, on GitHub's black 5.2 : 1
LABELS = {"hybrid": "Overspill hybrid", "edge-only": "edge only", "cloud-only": "cloud only", "litellm": "LiteLLM"}
COLOURS = {"hybrid": "#2f9e78", "edge-only": "#c98a3a", "cloud-only": "#4c8fc4", "litellm": "#9a7bbd"}
PANELS = (
    ("goodput_per_s", "answers in time, per second", "{:.2f}"),
    ("quality_of_kept", "their mean quality", "{:.2f}"),
    ("ttft_ms_p95", "first token, p95, ms", "{:.0f}"),
    ("cloud_tokens_per_kept", "cloud tokens per answer", "{:.0f}"),
)


def main() -> None:
    """Print the table; write JSON and picture where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--load", type=float, default=Plan.load)
    asked.add_argument("--rate", type=float)
    parser.add_argument("--blocks", type=int, default=Plan.blocks)
    parser.add_argument("--block-s", type=float, default=Plan.block_s)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--edge-share", type=float, default=Plan.edge_share)
    arguments = parser.parse_args()
    plan = Plan(
        tuple(arguments.systems),
        arguments.load,
        arguments.rate,
        arguments.edge_share,
        arguments.blocks,
        arguments.block_s,
    )
    print(HEADER, flush=True)
    result = run(measure(plan), plan.limit_s)
    for row in result["systems"]:
        print(line(row))
    if arguments.json is None:
        return
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    try:
        draw(result, arguments.json)
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed (extra `dev`)", file=sys.stderr)


if __name__ == "__main__":
    main()
