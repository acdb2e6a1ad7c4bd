"""What failed for want of memory is told from what is broken."""

from __future__ import annotations

import errno

import pytest

from edge_agent.device.memory import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during initialization: std::bad_alloc"),
        RuntimeError("Failed to allocate memory for requested buffer of size 67108864"),
    ],
)
def test_want_of_memory_is_known(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), RuntimeError("bad shape"), ValueError("memory")])
def test_other_faults_are_none(error: Exception) -> None:
    assert not is_out_of_memory(error)
