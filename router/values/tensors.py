"""Tensors that go into a model and come out of it, whatever they mean: what a pipeline takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BYTES",
]
"""In the words of KServe V2; BYTES is a string of bytes an element."""

MAX_ROWS = 2048
"""Inputs of one request at most."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor by name.

    Attributes:
        shape: of one input, without the dimension that counts inputs; -1 may have any length.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    datatype: Datatype
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=-1, le=1 << 30)], ...], msgspec.Meta(max_length=7)]

    def __str__(self) -> str:
        return f"{self.name} {self.datatype}{list(self.shape)}"

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Whether one input of a shape fits."""
        return len(shape) == len(self.shape) and all(
            own in (-1, given) for own, given in zip(self.shape, shape, strict=True)
        )

    def takes(self, other: TensorSpec) -> bool:
        """Whether what fits `other` may fit here: a dimension that is open there is seen when it comes."""
        return (
            self.datatype == other.datatype
            and len(self.shape) == len(other.shape)
            and all(-1 in (own, given) or own == given for own, given in zip(self.shape, other.shape, strict=True))
        )


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model takes and returns; callers send all of the inputs."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor with its content.

    Attributes:
        shape: its first dimension counts inputs.
        data: little-endian, row by row; elements of BYTES are each preceded by their length in 4 bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a pipeline returned, one row for each input."""

    tensors: tuple[NamedTensor, ...]
