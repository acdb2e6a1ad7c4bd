"""Fields that are known, and served only at the value that changes nothing: refused by name, never dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.base.errors import InvalidRequest

Rule = tuple[str, Callable[[object], bool], str]
"""A field, whether a value of it changes nothing, and what to do about one that would."""


def only(*allowed: object) -> Callable[[object], bool]:
    """Return whether a value is one of `allowed`, its type included."""
    return lambda value: any(value == one and type(value) is type(one) for one in allowed)


def refuse_unserved(raw: Any, rules: tuple[Rule, ...]) -> None:
    """Hold a decoded body against the rules of its API.

    Raises:
        InvalidRequest: naming the field whose value would change the answer.
    """
    for name, neutral, remedy in rules:
        value = getattr(raw, name)
        if value is not None and not neutral(value):
            raise InvalidRequest(f"`{name}`: {remedy}", param=name)
