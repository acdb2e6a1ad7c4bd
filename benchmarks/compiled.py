"""What compiling the router with mypyc gains, and that it answers alike: both builds by turns, of the same sources.

    python -m benchmarks compiled -- [--rounds N] [--note TEXT]

Copies of the working tree are made below `.overspill/compiled`: one as it is, one compiled, one compiled with a profile
(some minutes, kept while no source changes). Each round measures in all, in processes of their own: single decisions
(`router_decision`, the default policy), and the simulator's requests a second of one core. Fails where the rows of any
simulation differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
KEPT = REPOSITORY / ".overspill/compiled"
COPIED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "overspill.py", "router", "benchmarks")
BUILDS = {"interpreted": "0", "compiled": "1", "profiled": "profiled"}
"""What `OVERSPILL_COMPILE` says for each."""


def trees(*builds: str, opt_level: str = "2") -> dict[str, Path]:
    """Return a copy of this tree for each build that is named, made anew where a source has changed.

    Args:
        opt_level: of the C compiler; 2 is what users get.
    """
    files = [file for name in COPIED for file in _files(REPOSITORY / name)]
    digest = hashlib.sha256(f"{sys.version} {sys.platform}".encode())
    for file in files:
        digest.update(f"{file.relative_to(REPOSITORY)}\0".encode() + file.read_bytes())
    folder = KEPT / f"{digest.hexdigest()[:16]}-O{opt_level}"
    if not folder.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        for old in KEPT.glob(f"*-O{opt_level}"):
            shutil.rmtree(old)
        folder.mkdir()
    for build in builds:
        if not (folder / build).exists():
            _make(build, files, folder, opt_level)
    return {build: folder / build for build in builds}


def _make(build: str, files: Iterable[Path], folder: Path, opt_level: str) -> None:
    with tempfile.TemporaryDirectory(dir=KEPT) as made:
        for file in files:
            copy = Path(made) / build / file.relative_to(REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        if build != "interpreted":
            _compile(Path(made) / build, BUILDS[build], opt_level)
        (Path(made) / build).rename(folder / build)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    kept = {".py", ".toml", ".gz", ".md", ".csv"}
    return sorted(file for file in path.rglob("*") if file.suffix in kept and "results" not in file.parts)


def _compile(folder: Path, wanted: str, opt_level: str) -> None:
    asked = {**os.environ, "OVERSPILL_COMPILE": wanted, "MYPYC_OPT_LEVEL": opt_level}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, env=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"setup.py failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def simulated(tree: Path, *arguments: str) -> dict[str, object]:
    """Return what `benchmarks._simulated` prints in a tree."""
    return _run(tree, "benchmarks._simulated", *arguments)


def _run(tree: Path, module: str, *arguments: str) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", module, "--json", file.name, *arguments]
        subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=True)
        found: dict[str, object] = json.loads(Path(file.name).read_text())
    return found


def _decisions(tree: Path) -> list[dict[str, float]]:
    found = _run(tree, "benchmarks.router_decision", "--policy", "slo-utility", "--decisions", "3000")
    rows = found["rows"]
    assert isinstance(rows, list)
    return [row for row in rows if row["candidates"] in {2, 8, 16}]


def main() -> int:
    """Print a table, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    arguments = parser.parse_args()
    copies = trees(*BUILDS)
    told = [simulated(tree, "--tell")["router"] for tree in copies.values()]
    assert told == ["interpreted", "compiled", "compiled"], told
    decided: dict[str, list[list[dict[str, float]]]] = {build: [] for build in BUILDS}
    simulations: dict[str, list[dict[str, Any]]] = {build: [] for build in BUILDS}
    for _ in range(arguments.rounds):
        for build, tree in copies.items():
            decided[build].append(_decisions(tree))
            simulations[build].append(simulated(tree))
    rows = [
        {
            "build": build,
            **_medians(decided[build]),
            "simulated_requests_per_s": _median(run["requests_per_s"] for run in simulations[build]),
            "sha256_of_rows": simulations[build][0]["sha256"],
        }
        for build in BUILDS
    ]
    alike = len({str(run["sha256"]) for build in BUILDS for run in simulations[build]}) == 1
    for row in rows:
        print(row)
    print("the simulations' rows are the same" if alike else "THE SIMULATIONS' ROWS DIFFER")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"note": arguments.note, "alike": alike, "rows": rows}, indent=1) + "\n")
    return 0 if alike else 1


def _medians(rounds: list[list[dict[str, float]]]) -> dict[str, float]:
    """Medians over the rounds, by candidates."""
    found = {}
    for index, row in enumerate(rounds[0]):
        for figure in ("median_us", "p99_us"):
            beside = f"_{row['running']}_running" if row["running"] else ""
            name = f"{figure.removesuffix('_us')}_us_{row['candidates']}_candidates{beside}"
            found[name] = _median(rows[index][figure] for rows in rounds)
    return found


def _median(figures: Iterable[float]) -> float:
    return round(statistics.median(figures), 1)


if __name__ == "__main__":
    raise SystemExit(main())
