"""Where a tree of plain values departs from the msgspec types it is to fit: which key, which value, why."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

Key = tuple["str | int", ...]


@dataclass(frozen=True, slots=True)
class Misfit:
    """The first value that does not fit.

    Attributes:
        key: where it stands; for a missing or unknown field, the struct that misses it or does not know it.
        what: in msgspec's words, or those of the type's own check.
        unknown: name of a field that the struct does not know.
        known: the names that it knows.
        missing: name of a required field that the struct lacks.
        wants_text: a text would fit there.
    """

    key: Key
    what: str
    unknown: str | None = None
    known: tuple[str, ...] = ()
    missing: str | None = None
    wants_text: bool = False


def misfit(value: Any, shape: Any, key: Key = ()) -> Misfit | None:
    """Return the first value below `value` that does not fit `shape`, strictly taken; None if all fit.

    Only what does not fit is taken apart, so the time grows with the size of `value` and the depth of the fault.

    Args:
        shape: a type that msgspec converts into: a Struct, or any annotation of one of its fields.
        key: where `value` stands.
    """
    error = _error(value, shape)
    if error is None:
        return None
    for kind in _candidates(value, shape):
        found = _part_misfit(value, kind, key)
        if found is not None:
            return found
    return _own_misfit(value, shape, key, error)


def keys_of(shape: Any) -> Iterator[tuple[str, ...]]:
    """Yield the keys of a Struct and of those inside it; elements of lists have none."""
    for kind in _alternatives(shape):
        if _is_struct(kind):
            for field in msgspec.structs.fields(kind):
                yield (field.encode_name,)
                for inner in keys_of(field.type):
                    yield (field.encode_name, *inner)


def dotted(key: Key) -> str:
    """Return a key as messages write it: `messages[1].content`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in key).removeprefix(".")


def value_at(tree: Any, key: Key) -> Any:
    """Return what stands at a key that a `Misfit` named."""
    for step in key:
        tree = tree[step]
    return tree


def _part_misfit(value: Any, kind: Any, key: Key) -> Misfit | None:
    """Look for the fault in the parts of a mapping or a sequence; `kind` is the type that takes it apart."""
    if _is_struct(kind):
        return _struct_misfit(value, kind, key)
    inner = get_args(kind)
    if isinstance(value, Mapping):
        names, values = (*inner, Any, Any)[:2]
        at = _first_at(list(value), names)
        if at is not None:  # the name itself: no text in place of the value would fit
            found = misfit(list(value)[at], names, key)
            return None if found is None else replace(found, wants_text=False)
        at = _first_at(list(value.values()), values)
        return None if at is None else misfit(list(value.values())[at], values, (*key, list(value)[at]))
    if len(inner) == 2 and inner[1] is not Ellipsis:  # a pair, say
        return None
    element = (*inner, Any)[0]
    at = _first_at(value, element)
    return None if at is None else misfit(value[at], element, (*key, at))


def _struct_misfit(value: Mapping[str, Any], kind: type[msgspec.Struct], key: Key) -> Misfit | None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name, child in value.items():
        if name in fields:
            found = misfit(child, fields[name].type, (*key, name))
        elif kind.__struct_config__.forbid_unknown_fields:
            found = Misfit(key, "unknown field", unknown=str(name), known=tuple(fields))
        else:
            found = None
        if found is not None:
            return found
    missing = next((name for name, field in fields.items() if field.required and name not in value), None)
    return None if missing is None else Misfit(key, f"Object missing required field `{missing}`", missing=missing)


def _own_misfit(value: Any, shape: Any, key: Key, error: str) -> Misfit:
    """Describe a value whose parts all fit: its own type is wrong, its bounds or its own check."""
    allowed = _allowed(shape)
    if any(type(value) is type(one) for one in allowed):
        error = f"expected one of {', '.join(map(repr, allowed))}"
    wants_text = str in _alternatives(shape) or any(isinstance(one, str) for one in allowed)
    return Misfit(key, error, wants_text=wants_text and not isinstance(value, str))


def _error(value: Any, shape: Any) -> str | None:
    try:
        msgspec.convert(value, shape, strict=True)
    except msgspec.ValidationError as error:
        return str(error)
    return None


def _first_at(values: Sequence[Any], shape: Any) -> int | None:
    """Return the index of the first value that does not fit, by halving: one conversion a value would take long."""
    if _error(values, list[shape]) is None:
        return None
    low, high = 0, len(values)  # all before `low` fit; below `high` one does not
    while high - low > 1:
        middle = (low + high) // 2
        if _error(values[low:middle], list[shape]) is None:
            low = middle
        else:
            high = middle
    return low


def _candidates(value: Any, shape: Any) -> list[Any]:
    """Return the one alternative of `shape` that `value` can be taken apart by, none if there are none or several."""
    kinds = [kind for kind in _alternatives(shape) if _holds(kind, value)]
    return kinds if len(kinds) == 1 else []


def _holds(kind: Any, value: Any) -> bool:
    origin = get_origin(kind) or kind
    if isinstance(value, Mapping):
        return _is_struct(kind) or origin is dict
    return isinstance(value, (list, tuple)) and origin in {list, tuple, set, frozenset}


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _alternatives(shape: Any) -> list[Any]:
    """Take a union and annotations apart."""
    origin = get_origin(shape)
    if origin is Annotated:
        return _alternatives(get_args(shape)[0])
    if origin in {Union, types.UnionType}:
        return [kind for part in get_args(shape) for kind in _alternatives(part)]
    return [shape]


def _allowed(shape: Any) -> list[Any]:
    """Return the values that a type lists: of a literal, or an enumeration."""
    found: list[Any] = []
    for kind in _alternatives(shape):
        if get_origin(kind) is Literal:
            found += sorted(get_args(kind), key=repr)
        elif isinstance(kind, type) and issubclass(kind, enum.Enum):
            found += [member.value for member in kind]
    return found
