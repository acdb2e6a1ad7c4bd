"""The few calls of CUDA that this project makes itself, by ctypes: no CUDA package to install.

`first_gpu` asks the driver which GPU this is; `Cuda` is a stream and memory, by the CUDA runtime. That memory is
page-locked and mapped into the GPU's address space: on boards whose GPU shares the CPU's memory (Jetson) both read and
write it in place and nothing is ever copied; on a discrete GPU it is read over the bus.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from router.base.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NAMES = ("libcudart.so", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0")
_HOST_ALLOC_MAPPED = 2
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed; the message holds CUDA's own words."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU that CUDA shows to this process.

    Attributes:
        compute_capability: (major, minor), e.g. (8, 7) for Orin.
        memory_bytes: all of it; on a Jetson that is the memory of the whole board.
        cuda_version: of the driver, such as 12060.
    """

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    cuda_version: int

    @property
    def target(self) -> str:
        """What an engine is built for, e.g. `sm87`."""
        major, minor = self.compute_capability
        return f"sm{major}{minor}"


def first_gpu() -> Gpu | None:
    """Ask the driver for the first GPU; None without a GPU or its driver. Takes no memory of the GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, version = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        number = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            return None
        numbers.append(number.value)
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    driver.cuDriverGetVersion(ctypes.byref(version))
    return Gpu(name.value.decode("utf-8", "replace"), (numbers[0], numbers[1]), memory.value, version.value)


class Cuda:
    """A stream, and memory that CPU and GPU share.

    Raises:
        ConfigError: there is no CUDA runtime library, or no GPU that it can use.
    """

    def __init__(self) -> None:
        self._library = _load()
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        count = ctypes.c_int()
        if self._library.cudaGetDeviceCount(ctypes.byref(count)) != 0 or count.value == 0:
            raise ConfigError(
                "the CUDA runtime finds no GPU; check the driver with nvidia-smi (on a Jetson: tegrastats)"
            )
        stream = ctypes.c_void_p()
        self._check(self._library.cudaStreamCreate(ctypes.byref(stream)), "cudaStreamCreate")
        self.stream = int(stream.value or 0)

    def empty(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Return a zeroed array that the GPU can address too; freed with its last view."""
        import numpy as np  # noqa: PLC0415 (whoever only asks for the GPU needs no arrays)

        count = int(np.prod(shape, dtype=np.int64))
        size_bytes = max(count, 1) * np.dtype(dtype).itemsize
        pointer = ctypes.c_void_p()
        flags = ctypes.c_uint(_HOST_ALLOC_MAPPED)
        code = self._library.cudaHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size_bytes), flags)
        self._check(code, f"cudaHostAlloc of {size_bytes} bytes")
        address = int(pointer.value or 0)
        memory = (ctypes.c_byte * size_bytes).from_address(address)
        weakref.finalize(memory, self._library.cudaFreeHost, ctypes.c_void_p(address))
        array: npt.NDArray[Any] = np.frombuffer(memoryview(memory), dtype=dtype, count=count).reshape(shape)
        array[...] = 0
        return array

    def device_address(self, array: npt.NDArray[Any]) -> int:
        """Return the GPU's address of an array from `empty` (or of a part of one)."""
        pointer = ctypes.c_void_p()
        host = ctypes.c_void_p(array.ctypes.data)
        code = self._library.cudaHostGetDevicePointer(ctypes.byref(pointer), host, ctypes.c_uint(0))
        self._check(code, "cudaHostGetDevicePointer")
        return int(pointer.value or 0)

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        self._check(self._library.cudaStreamSynchronize(ctypes.c_void_p(self.stream)), "cudaStreamSynchronize")

    def close(self) -> None:
        self._library.cudaStreamDestroy(ctypes.c_void_p(self.stream))

    def _check(self, code: int, call: str) -> None:
        if code != 0:
            words = self._library.cudaGetErrorString(ctypes.c_int(code)) or b"unknown error"
            raise CudaError(f"{call} failed: {words.decode()} ({code})")


def _load() -> Any:
    found = ctypes.util.find_library("cudart")
    for name in (*((found,) if found else ()), *_NAMES):
        try:
            return ctypes.CDLL(name)
        except OSError:  # noqa: PERF203
            continue
    raise ConfigError(
        'no CUDA runtime library (libcudart.so) found; install the CUDA toolkit, or choose runtime.name = "onnx"',
        param="runtime.name",
    )
