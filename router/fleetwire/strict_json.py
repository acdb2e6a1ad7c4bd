"""JSON without the latitude of RFC 8259: no duplicate keys, no NaN, no lone surrogates, bounded depth."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec

from router.base.errors import InvalidRequest

MAX_DEPTH = 32


class NotStrictJson(InvalidRequest):
    """The text is no JSON object, or not an unambiguous one; `param` is the key at fault if there is one."""

    code = "invalid_json"


def parse_object(payload: bytes) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        NotStrictJson: it is anything else.
    """
    try:
        tree = json.loads(
            payload.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite
        )
        msgspec.json.encode(tree)  # finds lone surrogates
    except NotStrictJson:
        raise
    except UnicodeError as error:
        raise NotStrictJson(f"the document is not valid UTF-8: {error}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise NotStrictJson(f"the document is not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise NotStrictJson(f"the document is a JSON {type(tree).__name__}, not an object")
    if is_deep(tree):
        raise NotStrictJson(f"the document is nested deeper than {MAX_DEPTH} levels")
    return tree


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        double = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise NotStrictJson(f"key `{double[:80]}` appears twice in one object", param=double)
    return tree


def _no_constant(name: str) -> NoReturn:
    raise NotStrictJson(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise NotStrictJson(f"{text[:80]} is out of the range of a number")
    return number


def is_deep(tree: object) -> bool:
    """Whether tables and arrays are nested deeper than `MAX_DEPTH`: whoever walks them may run out of stack."""
    level: list[Any] = [tree]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
        ]
        if not level:
            return False
    return True
