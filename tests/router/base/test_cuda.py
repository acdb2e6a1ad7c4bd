"""What the driver is asked, against a stand-in for its library; on a machine with a GPU, the real one."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from router.base.cuda import Cuda, Gpu, first_gpu
from router.base.errors import ConfigError


class Driver:
    """Answers as libcuda does on an Orin; `fails` names calls that return an error."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        return lambda *given: 100 if name in self.fails else self._answer(name, given)

    def _answer(self, name: str, given: tuple[Any, ...]) -> int:
        if name == "cuDeviceGetAttribute":
            given[0]._obj.value = {75: 8, 76: 7}[given[1]]
        elif name == "cuDeviceGetName":
            given[0].value = b"Orin"
        elif name == "cuDeviceTotalMem_v2":
            given[0]._obj.value = 61 << 30
        elif name == "cuDriverGetVersion":
            given[0]._obj.value = 12060
        return 0


def test_the_first_gpu_is_told_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    gpu = first_gpu()
    assert gpu == Gpu("Orin", (8, 7), 61 << 30, 12060)
    assert gpu.target == "sm87"


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_a_driver_without_a_gpu_has_none(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver((fails,)))
    assert first_gpu() is None


def test_without_a_driver_there_is_no_gpu_and_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert first_gpu() is None
    with pytest.raises(ConfigError, match=r"libcudart\.so") as raised:
        Cuda()
    assert raised.value.param == "runtime.name"


@pytest.mark.skipif(first_gpu() is None, reason="needs an NVIDIA GPU")
def test_memory_is_shared_with_a_real_gpu() -> None:
    stream = Cuda()
    array = stream.empty((3, 5), np.float32)
    assert not array.any()
    assert stream.device_address(array)
    stream.synchronize()
    stream.close()
