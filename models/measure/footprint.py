"""What one artifact costs in memory: `python -m models.footprint DIRECTORY` loads it, answers once, and says so.

Run in a process of its own, because memory that was used once is rarely given back. Prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from router.base.errors import ArtifactError


@dataclass(frozen=True)
class Footprint:
    """Resident memory of the process: before the model, with it, and after one answer."""

    empty_bytes: int
    loaded_bytes: int
    answered_bytes: int

    @property
    def model_bytes(self) -> int:
        """What model and runtime added, one answer given."""
        return self.answered_bytes - self.empty_bytes


def measure(directory: Path) -> Footprint:
    """Measure an artifact in a new process.

    Raises:
        ArtifactError: it cannot be loaded.
    """
    command = [sys.executable, "-m", "models.measure.footprint", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ArtifactError(f"{directory}: measuring its memory failed: {done.stderr.strip()[-400:]}")
    return Footprint(**json.loads(done.stdout))


def _measure_here(directory: Path) -> Footprint:
    import numpy as np  # noqa: PLC0415
    import psutil  # noqa: PLC0415

    from models.measure.runner import OnnxRunner  # noqa: PLC0415

    process = psutil.Process()
    empty_bytes = process.memory_info().rss
    runner = OnnxRunner(directory, threads=1)
    loaded_bytes = process.memory_info().rss
    prompt = np.random.default_rng(0).integers(0, runner.vocab_size, 64).tolist()
    runner.generate([[*runner.prefix_ids, *prompt]], 32, frozenset())
    return Footprint(empty_bytes, loaded_bytes, process.memory_info().rss)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_measure_here(Path(sys.argv[1])))))
