"""Run every benchmark, one after the other, and keep their JSON: `make bench` or `python -m benchmarks [NAME …]`.

`routing` has a target of its own, `make bench-routing`: it takes as long as all others together.
Results go to `benchmarks/results/<name>.json`, stamped with the machine and the day.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
APART = {"routing"}


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = f"{models[0]}, {len(models)} cores" if models else cpu
    return {"cpu": cpu, "system": platform.platform(), "python": platform.python_version()}


def main() -> int:
    known = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_") and path.stem not in APART)
    names = sys.argv[1:] or known
    failed = [name for name in names if name not in known]
    if failed:
        print(f"no benchmark called {', '.join(failed)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    for name in names:
        result = HERE / "results" / f"{name}.json"
        print(f"\n── {name} ──", flush=True)
        run = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--json", str(result)], check=False)
        if run.returncode:
            failed.append(name)
            continue
        stamped = {
            "measured": datetime.now(timezone.utc).date().isoformat(),
            "machine": machine(),
            "result": json.loads(result.read_text()),
        }
        result.write_text(json.dumps(stamped, indent=1) + "\n")
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
