"""Run every benchmark, one after the other, and keep their JSON: `make bench` or `python -m benchmarks [NAME …]`.

`routing` and `engine` have targets of their own, `make bench-routing` and `make bench-engine`: they take as long as all
others together, and `engine` wants servers that are installed apart, as does `make bench-gateway`. `make bench-gpu`
wants a GPU. `engine_soak` is started as a module: 20 minutes.
`spill` is told on its command line which servers of other makers to start.
Results go to `benchmarks/results/<name>.json`, stamped with the machine, the day and the commit. What follows `--` goes
to the benchmark: `python -m benchmarks links -- --lte UP DOWN`.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
APART = {"routing", "spill", "engine", "engine_soak", "gpu"}


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = f"{models[0]}, {len(models)} cores" if models else cpu
    return {"cpu": cpu, "system": platform.platform(), "python": platform.python_version()}


def commit() -> str:
    """Return the commit that is measured, with a `+` where other files than results differ from it; else nothing."""
    head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=HERE, capture_output=True, check=False)
    if head.returncode:
        return ""
    others = ["--", ":/", ":(exclude,top)benchmarks/results", ":(exclude,top)docs/compatibility.md"]
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", *others], cwd=HERE, check=False).returncode
    return head.stdout.decode().strip() + ("+" if changed else "")


def main() -> int:
    known = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_") and path.stem not in APART)
    given = sys.argv[1:]
    passed_on = given[given.index("--") + 1 :] if "--" in given else []
    names = (given[: given.index("--")] if "--" in given else given) or known
    failed = [name for name in names if name not in known]
    if failed:
        print(f"no benchmark called {', '.join(failed)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    for name in names:
        result = HERE / "results" / f"{name}.json"
        print(f"\n── {name} ──", flush=True)
        measured = commit()
        run = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", "--json", str(result), *passed_on], check=False
        )
        if run.returncode:
            failed.append(name)
            continue
        stamped = {
            "measured": datetime.now(timezone.utc).date().isoformat(),
            "machine": machine(),
            "commit": measured,
            "result": json.loads(result.read_text()),
        }
        result.write_text(json.dumps(stamped, indent=1) + "\n")
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
