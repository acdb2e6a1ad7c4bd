"""Tenants on one tier: a flood beside a neighbour, a storm of retries, and a hundred thousand random requests.

    python -m benchmarks tenants -- [--part shares,storm,fuzz] [--seeds N] [--requests N]

The first two run on virtual time: the real gateway, limits and dispatcher, the real `openai` library with its retries,
and a simulated device of eight slots, so nothing depends on the machine. The third sends to a whole gateway without
sockets.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks._stamp import commit, machine
from benchmarks.tenants import fuzz, shares, storm
from benchmarks.tenants.house import Setting

LEAST_OF_FAIR = 0.9  # 45 % of the device for who asks for half of it
LEAST_GOODPUT = 0.9
CLIENTS = (10, 50, 200)

Rows = list[dict[str, object]]


def show_shares(seeds: int, pool: ProcessPoolExecutor) -> Rows:
    """One tenant asks for ten times what the other does."""
    settings = (Setting(callers=0.0), Setting())
    work = [(mix, setting, seed) for mix in shares.MIXES for setting in settings for seed in range(1, seeds + 1)]
    print(f"\n{'the flood':22}{'fairness':>10}{'asked':>9}{'got':>9}{'of its fair part':>19}{'refused':>10}")
    rows = list(pool.map(shares.run, *zip(*work, strict=True)))
    for mix in shares.MIXES:
        for setting in settings:
            mine = [row for row in rows if (row["mix"], row["callers"]) == (mix, setting.callers)]
            asked, got, fair = (_mean(mine, name) for name in ("asked_share", "got_share", "got_of_fair"))
            how = "on" if setting.callers else "off"
            print(f"{mix:22}{how:>10}{asked:>9.1%}{got:>9.1%}{fair:>19.1%}{_mean(mine, 'refused'):>10.1f}")
    return rows


def show_storm(seeds: int, pool: ProcessPoolExecutor) -> Rows:
    """More and more clients, and 200 of them after the device stood still."""
    settings = (Setting(retries=1.0), Setting())
    work = [(clients, setting, seed) for setting in settings for clients in CLIENTS for seed in range(1, seeds + 1)]
    rows = list(pool.map(_storm, work))
    print(
        f"\n{'clients':>8}{'retry budget':>14}{'goodput/s':>11}{'of the peak':>13}{'after outage':>14}{'failed/s':>10}"
    )
    for setting in settings:
        mine = [row for row in rows if row["retries"] == setting.retries]
        peak = max(_mean([r for r in mine if r["clients"] == clients], "goodput_per_s") for clients in CLIENTS)
        for clients in CLIENTS:
            here = [row for row in mine if row["clients"] == clients]
            good, after, failed = (
                _mean(here, name) for name in ("goodput_per_s", "goodput_after_outage_per_s", "failed_per_s")
            )
            how = "off" if setting.retries >= 1.0 else f"{setting.retries:.0%}"
            print(f"{clients:>8}{how:>14}{good:>11.2f}{good / peak:>13.1%}{after / peak:>14.1%}{failed:>10.2f}")
            for row in here:
                row["of_peak"], row["after_outage_of_peak"] = round(good / peak, 4), round(after / peak, 4)
    return rows


def show_fuzz(requests: int, pool: ProcessPoolExecutor) -> Rows:
    """Random requests, in two processes."""
    rows = list(pool.map(fuzz.run, (requests // 2, requests - requests // 2), (1, 2)))
    for row in rows:
        print(f"\nseed {row['seed']}: {row['requests']} requests in {row['took_s']} s, {row['answers']} answered")
        print(f"  statuses {row['statuses']}")
        for fault in row["faults"]:  # type: ignore[attr-defined]
            print(f"  {fault}")
    return rows


def verdict(found: dict[str, Rows]) -> list[str]:
    """Say what falls short."""
    short = [
        f"{row['mix']}, seed {row['seed']}: {row['got_of_fair']:.1%} of the fair part"
        for row in found.get("shares", ())
        if row["callers"] and float(str(row["got_of_fair"])) < LEAST_OF_FAIR
    ]
    short += [
        f"{row['clients']} clients: {row['of_peak']:.1%} of the peak, {row['after_outage_of_peak']:.1%} after outage"
        for row in found.get("storm", ())
        if row["clients"] == CLIENTS[-1]
        and float(str(row["retries"])) < 1.0
        and min(float(str(row["of_peak"])), float(str(row["after_outage_of_peak"]))) < LEAST_GOODPUT
    ]
    return short + [f"fuzz: {fault}" for row in found.get("fuzz", ()) for fault in row["faults"]]  # type: ignore[attr-defined]


def _storm(work: tuple[int, Setting, int]) -> dict[str, object]:
    clients, setting, seed = work
    return storm.run(clients, setting, seed, outage=True)


def _mean(rows: Rows, name: str) -> float:
    return sum(float(str(row[name])) for row in rows) / len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="shares,storm,fuzz")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=100_000, help="of the fuzz")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, Rows] = {}
    with ProcessPoolExecutor(2) as pool:
        parts: dict[str, Callable[[], Rows]] = {
            "shares": lambda: show_shares(asked.seeds, pool),
            "storm": lambda: show_storm(asked.seeds, pool),
            "fuzz": lambda: show_fuzz(asked.requests, pool),
        }
        for name in asked.part.split(","):
            found[name] = parts[name]()
    if asked.json is not None:
        stamped = {"machine": machine(), "commit": commit(), **found}
        asked.json.write_text(json.dumps(stamped, indent=1) + "\n")
    short = verdict(found)
    for line in short:
        print(f"falls short: {line}", file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
