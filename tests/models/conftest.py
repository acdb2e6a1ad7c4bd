"""What every test of the toolchain starts from."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Sums come out the same on every machine; a test that uses no torch does not load it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
