"""GGUF files: header, metadata and tensors, read through a memory map.

The header is parsed here, so that a tokenizer can be had from a GGUF file in a fraction of a second and a few
megabytes; the `gguf` library is loaded only to dequantize. Format: ggml's `docs/gguf.md`, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from router.base.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# value type → struct code, for all types but string and array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_F32, _F16, _BF16 = 0, 1, 30
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        shape: row-major, slowest dimension first (numpy's order, the reverse of ggml's).
        ggml_type: the numeric ggml type.
        offset: bytes from the beginning of the file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GgufFile:
    """An open GGUF file.

    Attributes:
        metadata: key → int, float, bool, str or list of these.
        tensors: name → TensorInfo.
    """

    def __init__(self, path: Path) -> None:
        """Map `path` and parse its header.

        Raises:
            ArtifactError: the file is missing, is no GGUF file, or ends inside its header.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ArtifactError(f"cannot read {path}: {error}; pull the model again") from error
        cursor = _Cursor(self._map)
        try:
            self.metadata, self.tensors = self._parse(cursor)
        except (struct.error, IndexError, UnicodeDecodeError, KeyError) as error:
            raise ArtifactError(
                f"{path}: the GGUF header breaks off or is damaged near byte {cursor.position}; pull the model again"
            ) from error

    def _parse(self, cursor: _Cursor) -> tuple[Mapping[str, Any], Mapping[str, TensorInfo]]:
        magic = cursor.take(4)
        if magic != _MAGIC:
            raise ArtifactError(f"{self.path}: not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise ArtifactError(f"{self.path}: GGUF version {version} is unknown; versions 2 and 3 can be read")
        tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
        metadata = {}
        for _ in range(key_count):
            key = cursor.text()
            metadata[key] = cursor.value(cursor.number("I"))
        infos = []
        for _ in range(tensor_count):
            name = cursor.text()
            dimensions = cursor.number("I")
            if dimensions > _MAX_DIMENSIONS:
                raise IndexError(dimensions)
            shape = tuple(reversed(cursor.array("Q", dimensions)))
            infos.append(TensorInfo(name, shape, cursor.number("I"), cursor.number("Q")))
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-cursor.position // alignment) * alignment
        tensors = {info.name: TensorInfo(info.name, info.shape, info.ggml_type, start + info.offset) for info in infos}
        return MappingProxyType(metadata), MappingProxyType(tensors)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor dequantized to float32, in its row-major shape.

        Raises:
            ArtifactError: there is no such tensor, its type cannot be dequantized, or the file ends inside it.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ArtifactError(f"{self.path}: has no tensor `{name}`")
        if info.ggml_type == _F32:
            return self._raw(info, np.dtype("<f4")).astype(np.float32)
        if info.ggml_type == _F16:
            return self._raw(info, np.dtype("<f2")).astype(np.float32)
        if info.ggml_type == _BF16:
            halves = self._raw(info, np.dtype("<u2")).astype(np.uint32)
            widened: npt.NDArray[np.float32] = (halves << np.uint32(16)).view(np.float32)
            return widened
        return self._dequantize(info)

    def _dequantize(self, info: TensorInfo) -> npt.NDArray[np.float32]:
        from gguf import constants, quants  # noqa: PLC0415 — offline machines that only run ONNX go without it

        try:
            kind = constants.GGMLQuantizationType(info.ggml_type)
        except ValueError as error:
            raise ArtifactError(f"{self.path}: `{info.name}` has the unknown ggml type {info.ggml_type}") from error
        block_values, block_bytes = constants.GGML_QUANT_SIZES[kind]
        if info.shape[-1] % block_values:
            raise ArtifactError(f"{self.path}: rows of `{info.name}` are no multiple of {block_values} values")
        rows = int(np.prod(info.shape[:-1], dtype=np.int64))
        row_bytes = info.shape[-1] // block_values * block_bytes
        packed = self._bytes(info, rows * row_bytes).reshape(rows, row_bytes)
        try:
            values = quants.dequantize(packed, kind)
        except NotImplementedError as error:
            raise ArtifactError(f"{self.path}: `{info.name}` is {kind.name}, which cannot be dequantized") from error
        return np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)

    def _raw(self, info: TensorInfo, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        count = int(np.prod(info.shape, dtype=np.int64))
        return self._bytes(info, count * dtype.itemsize).view(dtype).reshape(info.shape)

    def _bytes(self, info: TensorInfo, size_bytes: int) -> npt.NDArray[np.uint8]:
        if info.offset + size_bytes > len(self._map):
            raise ArtifactError(f"{self.path}: the file ends inside `{info.name}`: it is truncated; pull it again")
        return np.frombuffer(self._map, dtype=np.uint8, count=size_bytes, offset=info.offset)


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, size_bytes: int) -> bytes:
        chunk = self._data[self.position : self.position + size_bytes]
        if len(chunk) != size_bytes:
            raise IndexError(self.position)
        self.position += size_bytes
        return chunk

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def array(self, code: str, count: int) -> tuple[Any, ...]:
        size_bytes = struct.calcsize("<" + code) * count
        if size_bytes > len(self._data) - self.position:
            raise IndexError(self.position)
        return struct.unpack(f"<{count}{code}", self.take(size_bytes))

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            return list(self.array(_SCALARS[item], count))
        if count > len(self._data) - self.position:
            raise IndexError(self.position)
        return [self.value(item) for _ in range(count)]
