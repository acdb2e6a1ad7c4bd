"""Random JSON schemas and regular expressions whose answers are short, and who answers to them rightly."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from router.values.constraint import Constraint, ConstraintKind


class Schemas:
    """Random schemas whose answers are short: mostly some tens of tokens."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)  # noqa: S311 (a benchmark's load)

    def next(self) -> dict[str, Any]:
        schema = self._object(2)
        if self._draw.random() < 0.2:
            schema["$defs"] = {"part": self._scalar()}
            schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        kind = self._draw.random()
        if depth == 0 or kind < 0.6:
            return self._scalar()
        if kind < 0.75:
            return self._object(depth - 1)
        if kind < 0.9:
            least = self._draw.randint(0, 2)
            return {"type": "array", "items": self._any(depth - 1), "minItems": least, "maxItems": least + 2}
        return {"anyOf": [self._scalar() for _ in range(self._draw.randint(2, 3))]}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._draw.sample(
            ["id", "name", "größe", "a b", "tags", "x-y", "kind", "n", "when", "ok"], self._draw.randint(1, 3)
        )
        required = [name for name in names if self._draw.random() < 0.7]
        properties = {name: self._any(depth) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _scalar(self) -> dict[str, Any]:
        draw = self._draw
        least = draw.randint(-50, 50)
        length = draw.randint(0, 6)
        choices: list[Callable[[], dict[str, Any]]] = [
            lambda: {"type": "string", "minLength": length, "maxLength": length + draw.randint(0, 8)},
            lambda: {
                "type": "string",
                "pattern": draw.choice(["^[A-Z]{2}[0-9]{3}$", "^(yes|no|maybe)$", "^[a-f0-9]{4,8}$"]),
            },
            lambda: {"type": "string", "format": draw.choice(["date", "ipv4", "uuid", "time", "date-time"])},
            lambda: {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 5000)},
            lambda: {"type": "number", "minimum": least, "exclusiveMaximum": least + draw.randint(1, 99)},
            lambda: {"type": draw.choice(["boolean", "null"])},
            lambda: {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            lambda: {"enum": draw.sample(["red", "green", 3, None, True, 'q"uote', "ü"], 3)},
            lambda: {"const": draw.choice(["fixed", 7, None])},
        ]
        return draw.choice(choices)()


class Regexes:
    """Random regular expressions whose matches are short."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)  # noqa: S311 (see above)

    def next(self) -> str:
        return "".join(self._part(2) for _ in range(self._draw.randint(1, 5)))

    def _part(self, depth: int) -> str:
        draw = self._draw
        if depth and draw.random() < 0.35:
            inner = "|".join(
                "".join(self._part(depth - 1) for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(1, 3))
            )
            return f"({inner})" + draw.choice(["", "?", "{1,2}"])
        atom = draw.choice(
            ["[a-z]", "[A-F0-9]", r"\d", "[^aeiou\\s]", "the ", "größe", r"\.", "🙂", r"\s", "[+-]", "x"]
        )
        return atom + draw.choice(["", "", "?", "{2}", "{1,4}", "+" if atom in ("x", r"\d") else ""])


def invalid(constraint: Constraint, text: str) -> str | None:
    """Return why an answer does not match, None if it does."""
    if constraint.kind is ConstraintKind.REGEX:
        return None if re.fullmatch(constraint.source, text) else "no match"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        jsonschema.Draft202012Validator(json.loads(constraint.source), format_checker=checker).validate(
            json.loads(text)
        )
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None
