"""Where a tree of plain values departs from the msgspec types it is to fit: which key, which value, why."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
        wants_text: a text would fit there.
    """

    key: Key
    what: str
    unknown: str | None = None
    known: tuple[str, ...] = ()
    wants_text: bool = False


def misfit(value: Any, shape: Any, key: Key = ()) -> Misfit | None:
    """Return the first value below `value` that does not fit `shape`, None if all fit.

    Args:
        shape: a type that msgspec converts into: a Struct, or any annotation of one of its fields.
        key: where `value` stands.
    """
    for kind in _candidates(value, shape):
        if _is_struct(kind):
            return _struct_misfit(value, kind, key) or _own_misfit(value, shape, key)
        inner = get_args(kind)
        if isinstance(value, Mapping):
            names, values = (*inner, Any, Any)[:2]
            found = _first(_named(_own_misfit(name, names, key)) for name in value)
            found = found or _first(misfit(child, values, (*key, name)) for name, child in value.items())
        elif len(inner) == 2 and inner[1] is not Ellipsis:  # a pair, say
            found = None
        else:
            found = _first(misfit(child, (*inner, Any)[0], (*key, index)) for index, child in enumerate(value))
        return found or _own_misfit(value, shape, key)
    return _own_misfit(value, shape, key)


def _struct_misfit(value: Mapping[str, Any], kind: type[msgspec.Struct], key: Key) -> Misfit | None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name, child in value.items():
        if name in fields:
            found = misfit(child, fields[name].type, (*key, name))
        elif kind.__struct_config__.forbid_unknown_fields:
            found = Misfit(key, "unknown field", str(name), tuple(fields))
        else:
            found = None
        if found is not None:
            return found
    return None


def _own_misfit(value: Any, shape: Any, key: Key) -> Misfit | None:
    """Convert a value whose parts all fit: what is wrong now is its own type, its bounds or its own check."""
    try:
        msgspec.convert(value, shape, strict=True)
    except msgspec.ValidationError as error:
        allowed = _allowed(shape)
        what = str(error)
        if any(type(value) is type(one) for one in allowed):
            what = f"expected one of {', '.join(map(repr, allowed))}"
        wants_text = str in _alternatives(shape) or any(isinstance(one, str) for one in allowed)
        return Misfit(key, what, wants_text=wants_text and not isinstance(value, str))
    return None


def _named(found: Misfit | None) -> Misfit | None:
    """A key of a mapping that does not fit: no text instead of it would."""
    return None if found is None else Misfit(found.key, found.what)


def _first(found: Iterable[Misfit | None]) -> Misfit | None:
    return next((one for one in found if one is not None), None)


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
