"""The cores and the memory a process may use, and what its CPU multiplies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.base.host import computes_bfloat16, usable_cores, usable_memory_bytes


def test_a_container_quota_bounds_the_cores(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    every = len(os.sched_getaffinity(0))
    assert usable_cores(quota) == every
    for text, cores in (("max 100000\n", every), ("100000 100000\n", 1), ("50000 100000\n", 1)):
        quota.write_text(text)
        assert usable_cores(quota) == cores


def test_memory_is_what_the_system_has_left_and_its_container(tmp_path: Path) -> None:
    without = usable_memory_bytes(tmp_path)
    assert without > 0
    (tmp_path / "memory.current").write_text("300\n")
    for limit, expected in (("1000", 700), ("200", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert usable_memory_bytes(tmp_path) == expected
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_memory_bytes(tmp_path) > 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags : fpu avx512f avx512_bf16 amx_tile", True),
        ("flags : fpu avx512f avx512_vnni", False),
        ("Features : fp asimd i8mm bf16", True),
        ("", False),
    ],
)
def test_a_cpu_that_multiplies_bfloat16_says_so(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert computes_bfloat16(tmp_path / "cpuinfo") is expected
    assert not computes_bfloat16(tmp_path / "nothing")
