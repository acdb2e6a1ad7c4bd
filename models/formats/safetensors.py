"""Safetensors files without torch: a JSON header, then raw little-endian tensors, read through a memory map."""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from router.base.errors import ArtifactError

if TYPE_CHECKING:
    import numpy.typing as npt

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_BF16 = "BF16"
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One open `.safetensors` file."""

    def __init__(self, path: Path) -> None:
        """Map `path` and read its header.

        Raises:
            ArtifactError: the file is missing, truncated, or its header is damaged.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ArtifactError(f"cannot read {path}: {error}; pull the model again") from error
        try:
            self._entries = _entries(self._map)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path}: not a safetensors file, or damaged: {error}; pull it again") from error
        longest = max((entry.end for entry in self._entries.values()), default=0)
        if longest > len(self._map):
            raise ArtifactError(f"{path}: truncated: {len(self._map)} bytes, its header needs {longest}; pull it again")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor as a new float32 array.

        Raises:
            ArtifactError: there is no such tensor, or it is not F64, F32, F16 or BF16.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ArtifactError(f"{self.path}: has no tensor `{name}`")
        code = "<u2" if entry.dtype == _BF16 else _FLOATS.get(entry.dtype)
        if code is None:
            raise ArtifactError(
                f"{self.path}: `{name}` is {entry.dtype}; weights must be F32, F16 or BF16 (not quantised)"
            )
        dtype = np.dtype(code)
        count = int(np.prod(entry.shape, dtype=np.int64))
        if count * dtype.itemsize != entry.end - entry.start:
            raise ArtifactError(f"{self.path}: `{name}`: {entry.end - entry.start} bytes do not fit {entry.shape}")
        raw: npt.NDArray[Any] = np.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start)
        raw = raw.reshape(entry.shape)
        if entry.dtype == _BF16:  # the upper half of a float32
            widened: npt.NDArray[np.float32] = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
            return widened
        return raw.astype(np.float32)


def _entries(data: mmap.mmap) -> dict[str, _Entry]:
    (header_bytes,) = struct.unpack("<Q", data[:8])
    if header_bytes > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"its header claims {header_bytes} bytes")
    header = json.loads(data[8 : 8 + header_bytes])
    return {name: _entry(value, 8 + header_bytes) for name, value in header.items() if name != "__metadata__"}


def _entry(value: dict[str, Any], data_start: int) -> _Entry:
    start, end = value["data_offsets"]
    return _Entry(value["dtype"], tuple(value["shape"]), data_start + int(start), data_start + int(end))
