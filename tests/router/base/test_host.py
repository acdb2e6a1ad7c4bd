"""The cores and the memory a process may use, and what its CPU multiplies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.base.host import computes_bfloat16, usable_cores, usable_memory_bytes

EVERY = len(os.sched_getaffinity(0))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_a_container_quota_bounds_the_cores(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == EVERY
    for text, cores in (("max 100000", EVERY), ("100000 100000", 1), ("50000 100000", 1), ("0 0", EVERY), ("", EVERY)):
        write(tmp_path / "cpu.max", text)
        assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"a/b/cpu.max": "100000 100000"}, 1),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, 1),
        ({"a/b/cpu.max": "900000000 100000", "a/cpu.max": "max 100000"}, EVERY),
        ({"cpu/c/cpu.cfs_quota_us": "150000", "cpu/c/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "100000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/c/cpu.cfs_quota_us": "-1", "cpu/c/cpu.cfs_period_us": "100000"}, EVERY),
        ({"elsewhere/cpu.max": "100000 100000"}, EVERY),
    ],
)
def test_every_group_around_the_own_one_bounds_the_cores(tmp_path: Path, quotas: dict[str, str], expected: int) -> None:
    write(tmp_path / "own", "1:name=systemd:/elsewhere\n3:cpu,cpuacct:/c/d\n0::/a/b")
    for name, text in quotas.items():
        write(tmp_path / name, text)
    assert usable_cores(tmp_path, tmp_path / "own") == expected


def test_groups_of_version_1_bound_the_memory(tmp_path: Path) -> None:
    write(tmp_path / "own", "4:memory:/c/d\n0::/")
    write(tmp_path / "memory/c/memory.limit_in_bytes", "1000")
    write(tmp_path / "memory/c/memory.usage_in_bytes", "300")
    assert usable_memory_bytes(tmp_path, tmp_path / "own") == 700
    write(tmp_path / "memory/memory.limit_in_bytes", "9223372036854771712")
    write(tmp_path / "memory/memory.usage_in_bytes", "300")
    assert usable_memory_bytes(tmp_path, tmp_path / "own") == 700


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
    ("limits", "expected"),
    [
        ({"a/b": "1000"}, 700),
        ({"a/b": "max", "a": "900"}, 600),
        ({"a/b": "1000", "a": "500", "": "max"}, 200),
        ({"a/b": "1000", "a": "max", "": "301"}, 1),
        ({"a": "100"}, 0),
    ],
)
def test_every_group_around_the_own_one_bounds_the_memory(
    tmp_path: Path, limits: dict[str, str], expected: int
) -> None:
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/elsewhere\n0::/a/b\n")
    for group, limit in limits.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "memory.max").write_text(f"{limit}\n")
        (tmp_path / group / "memory.current").write_text("300\n")
    assert usable_memory_bytes(tmp_path, own) == expected


@pytest.mark.parametrize("text", ["", "0::/../../other\n", "12:memory:/docker\n"])
def test_a_group_that_is_not_seen_from_here_bounds_nothing(tmp_path: Path, text: str) -> None:
    own = tmp_path / "own"
    own.write_text(text)
    assert usable_memory_bytes(tmp_path, own) > 1_000_000


@pytest.mark.process
def test_the_own_address_space_bounds_the_memory() -> None:
    code = "from router.base.host import usable_memory_bytes; print(usable_memory_bytes())"
    found = {}
    for limit in (400_000_000, 4_000_000_000):
        run = subprocess.run(
            ["prlimit", f"--as={limit}", sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        found[limit] = int(run.stdout)
        assert 0 <= found[limit] < limit
    assert found[400_000_000] < found[4_000_000_000]


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
