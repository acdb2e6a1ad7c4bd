"""Giving memory back: file pages that can be read again go, changed ones never do."""

from __future__ import annotations

import mmap
from pathlib import Path

import psutil
import pytest

from edge_agent.device.memory import available_bytes, drop_file_pages, limit_arenas, rss_bytes
from router.base.host import trim_heap

SIZE = 8 << 20


@pytest.fixture
def mapped(tmp_path: Path) -> mmap.mmap:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def resident_bytes(path: Path) -> int:
    """What this process holds of the file: other tests' threads may move the process total meanwhile."""
    return sum(each.rss for each in psutil.Process().memory_maps() if each.path == str(path))


def test_clean_file_pages_are_dropped_and_come_back(mapped: mmap.mmap, tmp_path: Path) -> None:
    expected = bytes(mapped)
    assert resident_bytes(tmp_path / "weights") == SIZE
    assert drop_file_pages(tmp_path) == SIZE
    assert resident_bytes(tmp_path / "weights") == 0
    assert bytes(mapped) == expected
    assert drop_file_pages(tmp_path / "elsewhere") == 0


def test_a_mapping_with_a_changed_page_is_left_alone(mapped: mmap.mmap, tmp_path: Path) -> None:
    mapped[0] = 99
    assert drop_file_pages(tmp_path) == 0
    assert mapped[0] == 99


def test_figures_are_those_of_this_process() -> None:
    limit_arenas(2)
    trim_heap()
    assert 1e6 < rss_bytes() < available_bytes()
