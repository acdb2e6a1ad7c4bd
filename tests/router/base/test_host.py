"""The cores a process may use, and what its garbage collections look at."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from router.base.host import spare_what_was_imported, usable_cores


def test_a_container_quota_bounds_the_cores(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    every = len(os.sched_getaffinity(0))
    assert usable_cores(quota) == every
    for text, cores in (("max 100000\n", every), ("100000 100000\n", 1), ("50000 100000\n", 1)):
        quota.write_text(text)
        assert usable_cores(quota) == cores


def test_collections_leave_out_what_was_there_before_the_server() -> None:
    before = {"module": object()}
    try:
        spare_what_was_imported()
        since = [{}]
        assert gc.get_freeze_count() > 0
        assert any(each is since for each in gc.get_objects())
        assert not any(each is before for each in gc.get_objects())
    finally:
        gc.unfreeze()
