"""JSON bodies into structs, strictly: an error names the field at fault by its path."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from router.base.errors import InvalidRequest
from router.base.json_input import UNREADABLE
from router.base.shapes import dotted, misfit, value_at

S = TypeVar("S")

_MAX_SEARCHED_BYTES = 1024 * 1024  # of one field of the body: a fault in a longer one is named by that field alone
_MAX_SHOWN_CHARS = 60
_COUNTED_BYTES = 256 * 1024  # a shorter body cannot hold enough to keep others waiting
_MOST_BUILT = 400_000  # lists, objects and fields: a tenth of a second; prompts that are JSON themselves stay far below
_MOST_WHOLE = 2.0**63  # integers beyond are read nowhere

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_json(decoder: msgspec.json.Decoder[S], body: bytes) -> S:
    """Decode strictly, but that an integer may be written as a float without a fraction: `4.0` is 4.

    Raises:
        InvalidRequest: no JSON, or it does not fit; `param` is the path of the field. Or it is so finely divided that
            everybody would wait while it is read.
    """
    _require_coarse(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        return _decode_whole(decoder, body, str(error))
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the request body is no valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is no valid UTF-8: {error.reason}") from None
    except RecursionError:
        raise InvalidRequest("the request body is nested too deeply") from None


def _require_coarse(body: bytes) -> None:
    """Refuse what would be built of millions of values; a count of bytes is quick, and takes those in texts along.

    Raises:
        InvalidRequest: naming the bound.
    """
    if len(body) < _COUNTED_BYTES:
        return
    built = 0
    for sign in (b"[", b"{", b'":'):
        built += body.count(sign)
        if built > _MOST_BUILT:
            raise InvalidRequest(f"the request body has more than the {_MOST_BUILT:,} lists, objects and fields read")


def shown(value: object) -> str:
    """Return ` = value` for a number; nothing for all else: texts may be long, or private."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f" = {value}"[:_MAX_SHOWN_CHARS] if is_number else ""


def with_whole_numbers(value: Any) -> Any:
    """Return a tree of plain values with each float that has no fraction as the integer that it is."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _MOST_WHOLE else value
    if isinstance(value, list):
        return [with_whole_numbers(one) for one in value]
    return {name: with_whole_numbers(one) for name, one in value.items()} if isinstance(value, dict) else value


def _decode_whole(decoder: msgspec.json.Decoder[S], body: bytes, error: str) -> S:
    """Decode a body that did not fit once more, with whole numbers in the fields that did not."""
    shape: type[Any] = decoder.type
    types = {field.encode_name: field.type for field in msgspec.structs.fields(shape)}
    try:
        given = _fields_decoder.decode(body)
        whole = {name: _whole(raw, types[name]) if name in types else raw for name, raw in given.items()}
        body = msgspec.json.encode(whole)
        return decoder.decode(body)
    except msgspec.ValidationError as still:
        raise _explain(body, shape, str(still)) from None
    except UNREADABLE:
        raise _explain(body, shape, error) from None


def _whole(raw: msgspec.Raw, shape: Any) -> Any:
    """Return a field as it came where it fits, and where it is too long to be looked at."""
    if len(memoryview(raw)) > _MAX_SEARCHED_BYTES:
        return raw
    try:
        msgspec.json.decode(raw, type=shape)
    except msgspec.ValidationError:
        return with_whole_numbers(msgspec.json.decode(raw))
    return raw


def _explain(body: bytes, shape: type[Any], error: str) -> InvalidRequest:
    """Name the field at fault.

    Args:
        error: in msgspec's words, which hold where nothing can be said of a single field.
    """
    fields = {field.encode_name for field in msgspec.structs.fields(shape)}
    tree: dict[str, Any] = {}
    try:
        given = _fields_decoder.decode(body)
    except UNREADABLE:
        return InvalidRequest(f"the request body: {error}")
    for name, raw in given.items():
        if name in fields and len(memoryview(raw)) <= _MAX_SEARCHED_BYTES:
            try:
                tree[name] = msgspec.json.decode(raw)
            except UNREADABLE as unreadable:
                return InvalidRequest(f"`{name}`: {unreadable}", param=name)
    found = misfit(tree, shape)
    if found is None or (found.missing is not None and not found.key and found.missing in given):
        return InvalidRequest(f"the request body: {error}")
    if found.missing is not None:
        param = dotted((*found.key, found.missing))
        return InvalidRequest(f"`{param}` is required", param=param)
    param = dotted(found.key)
    return InvalidRequest(f"`{param}`{shown(value_at(tree, found.key))}: {found.what}", param=param)
