"""The cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path

from router.base.host import usable_cores


def test_a_container_quota_bounds_the_cores(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    every = len(os.sched_getaffinity(0))
    assert usable_cores(quota) == every
    for text, cores in (("max 100000\n", every), ("100000 100000\n", 1), ("50000 100000\n", 1)):
        quota.write_text(text)
        assert usable_cores(quota) == cores
