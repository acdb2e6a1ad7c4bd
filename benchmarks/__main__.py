"""Run benchmarks, one after the other, and keep their JSON in `benchmarks/results/`.

    python -m benchmarks                       # all that need nothing installed apart and no hours: `make bench`
    python -m benchmarks NAME … [-- OPTIONS]   # these; OPTIONS are the benchmark's own: `NAME -- --help` tells them
    python -m benchmarks --unkept NAME …       # print the figures, and keep no JSON: for a quick or partial run
    python -m benchmarks --list

A result is stamped with the machine, the day and the commit. A run whose OPTIONS chose a part keeps what it did not
measure, with the stamp that this had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks._kept import merged
from benchmarks._stamp import commit, machine, today
from router.base.usage_reports import silence_usage_reports

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
APART = {
    "compatibility": "real clients and servers, 40 minutes; writes docs/compatibility.md itself",
    "engine": "servers that are installed apart",
    "engine_soak": "20 minutes",
    "gateway": "servers that are installed apart",
    "gpu": "an NVIDIA GPU",
    "routing": "hours",
    "spill": "servers of other makers, which its options name",
}
"""Benchmarks that run only when they are named, and what they take."""
_KEEP_THEIR_OWN = {"compatibility"}


def known() -> list[str]:
    """Return the name of every benchmark: a module, or a package that can be run."""
    modules = [path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_")]
    return sorted([*modules, *(path.parent.name for path in HERE.glob("*/__main__.py"))])


def run(name: str, options: list[str], *, keep: bool) -> bool:
    """Run one; returns whether it went well."""
    print(f"\n── {name} ──", flush=True)
    measured, result = commit(), RESULTS / f"{name}.json"
    keep = keep and name not in _KEEP_THEIR_OWN
    kept = ["--json", str(result)] if keep else []
    before = result.read_text() if keep and result.exists() else ""
    passed = not subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *kept, *options], check=False).returncode
    text = result.read_text() if keep and result.exists() else ""
    if text == before:
        return passed
    told = json.loads(text)
    if "machine" not in told:
        told = {"measured": today(), "machine": machine(), "commit": measured, "result": told}
    if options and before:
        told = merged(name, json.loads(before), told)
    result.write_text(json.dumps(told, indent=1) + "\n")
    return passed


def main(arguments: list[str]) -> int:
    silence_usage_reports()
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--unkept", action="store_true", help="print the figures, and keep no JSON")
    parser.add_argument("--list", action="store_true", help="name every benchmark")
    wanted, options = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    if wanted.list:
        print("\n".join(f"{name:18}{APART.get(name, '')}".rstrip() for name in known()))
        return 0
    unknown = [name for name in wanted.names if name not in known()]
    if unknown:
        parser.error(f"no benchmark called {', '.join(unknown)}; there are {', '.join(known())}")
    if options and len(wanted.names) != 1:
        parser.error("what follows `--` goes to one benchmark: name it alone")
    if not wanted.unkept and any(option.split("=")[0] == "--json" for option in options):
        parser.error(f"the JSON is kept as {RESULTS.name}/NAME.json: leave `--json` out, or ask for --unkept")
    if options and {"-h", "--help"} & {*options}:
        return subprocess.run([sys.executable, "-m", f"benchmarks.{wanted.names[0]}", "--help"], check=False).returncode
    names = wanted.names or [name for name in known() if name not in APART]
    failed = [name for name in names if not run(name, options, keep=not wanted.unkept)]
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
