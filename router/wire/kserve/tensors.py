"""Tensors of the KServe V2 protocol: as JSON lists and as little-endian bytes.

Elements are Python values: bytes for BYTES, bool, int or float for the rest. Text models take a handful of elements a
request, so this stays free of numpy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from router.base.errors import InvalidRequest

Element = bytes | bool | int | float

MAX_ELEMENTS = 1 << 20
MAX_DIMENSIONS = 8

_FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_FLOATS = frozenset({"FP16", "FP32", "FP64"})


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named, typed array, elements in row-major order."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: tuple[Element, ...]


def element_count(shape: Sequence[int], at: str) -> int:
    """Return the product of the dimensions.

    Raises:
        InvalidRequest: a dimension is negative, or the tensor is larger than any input of a text model.
    """
    if len(shape) > MAX_DIMENSIONS:
        what = f"{len(shape)} dimensions, at most {MAX_DIMENSIONS} are read"
        raise InvalidRequest(f"`{at}.shape`: {what}", param=f"{at}.shape")
    if any(dimension < 0 for dimension in shape):
        raise InvalidRequest(f"`{at}.shape`: holds a negative dimension", param=f"{at}.shape")
    if any(dimension > MAX_ELEMENTS for dimension in shape):  # before they are multiplied, or written out
        what = f"a dimension above {MAX_ELEMENTS}, the most elements that are read"
        raise InvalidRequest(f"`{at}.shape`: {what}", param=f"{at}.shape")
    count = math.prod(shape)
    if count > MAX_ELEMENTS:
        raise InvalidRequest(f"`{at}.shape`: {count} elements, at most {MAX_ELEMENTS} are read", param=f"{at}.shape")
    return count


def check_datatype(datatype: str, at: str) -> None:
    if datatype != "BYTES" and datatype not in _FORMATS:
        known = ", ".join(["BYTES", *_FORMATS])
        raise InvalidRequest(f"`{at}.datatype`: `{datatype[:40]}` is none of {known}", param=f"{at}.datatype")


def element_bytes(datatype: str) -> int:
    """Return the size of an element of any type but BYTES."""
    return struct.calcsize("<" + _FORMATS[datatype])


def from_json(data: object, datatype: str, count: int, at: str) -> tuple[Element, ...]:
    """Read a flat or nested JSON list.

    Raises:
        InvalidRequest: wrong number or type of elements.
    """
    flat: list[object] = []
    _flatten(data, flat, count)
    if len(flat) != count:
        raise InvalidRequest(
            f"`{at}.data`: the shape asks for {count} elements, the data has others", param=f"{at}.data"
        )
    return tuple(_element(value, datatype, f"{at}.data[{index}]") for index, value in enumerate(flat))


def _flatten(data: object, into: list[object], limit: int) -> None:
    if not isinstance(data, list):
        into.append(data)
        return
    for item in data:
        if len(into) > limit:
            return
        _flatten(item, into, limit)


def _element(value: object, datatype: str, at: str) -> Element:
    if datatype == "BYTES" and isinstance(value, str):
        return value.encode("utf-8")
    if datatype == "BOOL" and isinstance(value, bool):
        return value
    if datatype in _FLOATS and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _float(value, datatype, at)
    if datatype[:3] in {"INT", "UIN"} and isinstance(value, int) and not isinstance(value, bool):
        try:
            struct.pack("<" + _FORMATS[datatype], value)
        except struct.error:
            raise InvalidRequest(f"`{at}`: {str(value)[:40]} does not fit {datatype}", param=at) from None
        return value
    raise InvalidRequest(f"`{at}`: a JSON {type(value).__name__} is no {datatype} element", param=at)


def _float(value: float, datatype: str, at: str) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        raise InvalidRequest(f"`{at}`: the number does not fit {datatype}", param=at) from None


def from_bytes(raw: memoryview, datatype: str, count: int, at: str) -> tuple[Element, ...]:
    """Read little-endian elements; BYTES elements are each preceded by their length in 4 bytes.

    Raises:
        InvalidRequest: the bytes are too few or too many for `count` elements.
    """
    if datatype == "BYTES":
        return _strings(raw, count, at)
    layout = struct.Struct(f"<{count}{_FORMATS[datatype]}")
    if layout.size != len(raw):
        raise InvalidRequest(
            f"`{at}`: {count} elements of {datatype} take {layout.size} bytes, got {len(raw)}", param=at
        )
    return layout.unpack(raw)


def _strings(raw: memoryview, count: int, at: str) -> tuple[bytes, ...]:
    found: list[bytes] = []
    offset = 0
    while offset < len(raw):
        start = offset + 4
        end = start + int.from_bytes(raw[offset:start], "little")
        if end > len(raw) or start > len(raw):
            raise InvalidRequest(f"`{at}`: element {len(found)} reaches past the end of the binary data", param=at)
        found.append(bytes(raw[start:end]))
        offset = end
    if len(found) != count:
        raise InvalidRequest(f"`{at}`: the shape asks for {count} elements, the data has {len(found)}", param=at)
    return tuple(found)


def to_bytes(tensor: Tensor) -> bytes:
    """Return the binary form."""
    if tensor.datatype == "BYTES":
        strings = [element for element in tensor.elements if isinstance(element, bytes)]
        return b"".join(len(text).to_bytes(4, "little") + text for text in strings)
    return struct.pack(f"<{len(tensor.elements)}{_FORMATS[tensor.datatype]}", *tensor.elements)


def to_json(tensor: Tensor) -> list[object]:
    """Return the flat JSON form; bytes that are no UTF-8 are shown with replacement characters."""
    return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in tensor.elements]
