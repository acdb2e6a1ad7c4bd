"""The heap of a server on large pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from router.base.large_pages import move_heap

MIB = 1 << 20


def told_bytes(name: str) -> int:
    """Return a sum over all of this process's mappings."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def test_what_lives_is_moved_and_what_is_only_reserved_stays_no_memory() -> None:
    living = [bytes([index % 251]) * MIB for index in range(64)]
    with mmap.mmap(-1, 256 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as reserved:
        reserved[0] = 1
        resident, large = told_bytes("Rss"), told_bytes("AnonHugePages")
        moved = move_heap()
        if not moved:
            pytest.skip("this system gives no large pages")
        assert told_bytes("AnonHugePages") >= max(large, moved)
        assert told_bytes("Rss") - resident <= moved // 2
        assert reserved[0] == 1
    assert all(piece == bytes([index % 251]) * MIB for index, piece in enumerate(living))


def test_a_system_without_large_pages_is_no_error(tmp_path: Path) -> None:
    assert move_heap(tmp_path / "hpage_pmd_size") == 0
    (tmp_path / "hpage_pmd_size").write_text("nonsense")
    assert move_heap(tmp_path / "hpage_pmd_size") == 0
