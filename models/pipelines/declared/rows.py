"""Inputs on their way through a pipeline: one dictionary of arrays each, stacked for a batch and taken apart again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.pipelines.declared.contract import Array, ArrayWork, Wired, dtype_of
from models.pipelines.stage import Work
from router.base.errors import InvalidRequest
from router.values.prompt import Input
from router.values.task import TensorCall
from router.values.tensors import NamedTensor, Signature, Tensors, TensorSpec

Row = dict[str, Array]


class BrokenContractError(Exception):
    """A stage returned something else than it said."""


def size_of(row: Row) -> int:
    """Return the bytes that an input takes, whatever it has become on its way."""
    return sum(sum(map(len, array.ravel())) if array.dtype.kind == "O" else array.nbytes for array in row.values())


@dataclass(frozen=True, slots=True)
class OpenRows:
    """Makes a stage's function of rows, in its worker: `models.pipelines.stage.Opens`."""

    wired: Wired

    def __call__(self) -> Work:
        return RowWork(self.wired, self.wired.kind.open())


@dataclass(frozen=True, slots=True)
class RowWork:
    """A stage's function of rows over one of arrays. Rows of one shape are computed together."""

    wired: Wired
    work: ArrayWork

    def __call__(self, batch: list[Row]) -> list[Row]:
        found: list[Row | None] = [None] * len(batch)
        for places in self._alike(batch):
            rows = [batch[place] for place in places]
            stacked = {spec.name: self._stacked(spec, [row[name] for row in rows]) for name, spec in self.wired.reads}
            written = self.work(stacked)
            columns = [(name, _column(written, spec, len(rows))) for spec, name in self.wired.writes]
            for at, place in enumerate(places):
                kept = {name: batch[place][name] for name in self.wired.keep if name in batch[place]}
                found[place] = kept | {name: column[at] for name, column in columns}
        return [row for row in found if row is not None]

    def _alike(self, batch: list[Row]) -> list[list[int]]:
        """Group rows that can be stacked: all of them where open dimensions are padded."""
        if self.wired.settings.buckets:
            return [list(range(len(batch)))]
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for place, row in enumerate(batch):
            groups.setdefault(tuple(row[name].shape for name, _ in self.wired.reads), []).append(place)
        return list(groups.values())

    def _stacked(self, spec: TensorSpec, arrays: Sequence[Array]) -> Array:
        if self.wired.settings.buckets and -1 in spec.shape:
            return padded(arrays, at_least=self._bucket(arrays, spec.shape.index(-1)), axis=spec.shape.index(-1))
        return np.stack(arrays)

    def _bucket(self, arrays: Sequence[Array], axis: int) -> int:
        longest = max(array.shape[axis] for array in arrays)
        return next((size for size in self.wired.settings.buckets if size >= longest), longest)


def length_of(wired: Wired) -> tuple[str, int] | None:
    """Return the tensor and the axis whose length buckets sort by; None where nothing is open."""
    return next(((name, spec.shape.index(-1)) for name, spec in wired.reads if -1 in spec.shape), None)


def padded(arrays: Sequence[Array], at_least: int = 0, axis: int = 0) -> Array:
    """Stack arrays of one rank, filled up with zeros, or with empty strings of bytes, to one shape."""
    shape = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    if shape and at_least:
        shape[axis] = max(shape[axis], at_least)
    dtype = arrays[0].dtype
    whole: Array = (
        np.full((len(arrays), *shape), b"", dtype) if dtype.kind == "O" else np.zeros((len(arrays), *shape), dtype)
    )
    for row, array in zip(whole, arrays, strict=True):
        row[tuple(slice(0, size) for size in array.shape)] = array
    return whole


def _column(written: Mapping[str, Any], spec: TensorSpec, rows: int) -> Sequence[Array]:
    """Return what a stage wrote of one tensor, an array for each row.

    Raises:
        BrokenContractError: it is not what the contract says.
    """
    if not isinstance(written, Mapping) or spec.name not in written:
        there = ", ".join(map(str, written)) if isinstance(written, Mapping) else type(written).__name__
        raise BrokenContractError(f"it returned {there or 'nothing'}, and not `{spec.name}`")
    column = written[spec.name]
    if len(column) != rows:
        raise BrokenContractError(f"`{spec.name}` has {len(column)} rows for {rows} inputs")
    for array in column if not isinstance(column, np.ndarray) else column[:1]:
        seen = np.asarray(array)
        if seen.dtype != dtype_of(spec.datatype) or not spec.holds(seen.shape):
            raise BrokenContractError(
                f"`{spec.name}` is {seen.dtype}{list(seen.shape)}, its contract says "
                f"{spec.datatype}{list(spec.shape)} for each input"
            )
    if spec.datatype == "BYTES":
        _check_bytes(column, spec.name)
    return [np.asarray(array, dtype_of(spec.datatype)) for array in column]


def _check_bytes(column: Sequence[Any], name: str) -> None:
    """Arrays of objects may hold anything."""
    elements = (one for array in column for one in np.asarray(array).ravel())
    others = {type(one).__name__ for one in elements if not isinstance(one, bytes)}
    if others:
        raise BrokenContractError(f"`{name}` holds {', '.join(sorted(others))}, BYTES are Python `bytes`: encode it")


@dataclass(frozen=True, slots=True)
class Rows:
    """How a call becomes rows of a pipeline, and rows an answer: `models.pipelines.replica.Calls`."""

    signature: Signature

    def values(self, prompt: Input) -> Sequence[Row]:
        """Return the inputs of a call.

        Raises:
            InvalidRequest: it asks for something else, or has other tensors than the pipeline takes.
        """
        if not isinstance(prompt, TensorCall):
            raise InvalidRequest("this model takes tensors: send it to /v2/models/…/infer", param="model")
        by_name = {tensor.name: tensor for tensor in prompt.tensors}
        for spec in self.signature.inputs:
            tensor = by_name.get(spec.name)
            if tensor is None or tensor.datatype != spec.datatype or not spec.holds(tensor.shape[1:]):
                raise InvalidRequest(f"`inputs`: this model takes {spec} for each input", param=spec.name)
        columns = {name: array_of(tensor) for name, tensor in by_name.items()}
        return [{name: column[row] for name, column in columns.items()} for row in range(prompt.rows)]

    def output(self, results: Sequence[Row]) -> tuple[Tensors, int]:
        """Return the answer, and how many inputs it is of; rows of different shapes are filled up with zeros."""
        return Tensors(
            tuple(tensor_of(spec, padded([row[spec.name] for row in results])) for spec in self.signature.outputs)
        ), len(results)


def array_of(tensor: NamedTensor) -> Array:
    """Return the content of a tensor; BYTES as objects."""
    if tensor.datatype != "BYTES":
        return np.frombuffer(tensor.data, dtype_of(tensor.datatype)).reshape(tensor.shape)
    found, at = [], 0
    while at < len(tensor.data):
        size = int.from_bytes(tensor.data[at : at + 4], "little")
        found.append(tensor.data[at + 4 : at + 4 + size])
        at += 4 + size
    array = np.empty(len(found), object)
    array[:] = found
    return array.reshape(tensor.shape)


def tensor_of(spec: TensorSpec, array: Array) -> NamedTensor:
    """Return an array as it goes over the wire."""
    if spec.datatype == "BYTES":
        data = b"".join(len(text).to_bytes(4, "little") + text for text in array.ravel())
    else:
        data = np.ascontiguousarray(array, dtype_of(spec.datatype)).tobytes()
    return NamedTensor(spec.name, spec.datatype, array.shape, data)
