"""Fields that are known, and served only at the value that changes nothing: refused by name, never dropped."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

from router.base.errors import InvalidRequest

Rule = tuple[str, Callable[[object], bool], str]
"""A field, whether a value of it changes nothing, and what to do about one that would."""


def only(*allowed: object) -> Callable[[object], bool]:
    """Return whether a value is one of `allowed`, its type included."""
    return lambda value: any(value == one and type(value) is type(one) for one in allowed)


class Unserved:
    """The rules of one API. They are many, and hardly any body has a field that one is about."""

    def __init__(self, *rules: Rule) -> None:
        self._rules = rules
        self._names = frozenset([name for name, _, _ in rules])

    def refuse(self, raw: Any, named: AbstractSet[str]) -> None:
        """Hold a decoded body against them.

        Args:
            named: the fields that it has.

        Raises:
            InvalidRequest: naming the field whose value would change the answer.
        """
        if self._names.isdisjoint(named):
            return
        for name, neutral, remedy in self._rules:
            value = getattr(raw, name)
            if value is not None and not neutral(value):
                raise InvalidRequest(f"`{name}`: {remedy}", param=name)
