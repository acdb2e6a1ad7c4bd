"""Numbers under a schema, held to its bounds as doubles too: that is what whoever reads an answer makes of them.

Less in decimals is not less as a double: -15.0000000000000005 is below -15, and read as -15. Two decimals of at most
15 digits are never read as one double, so under a bound that itself is excluded numbers get fewer decimals than that.
And where zero is excluded, llguidance lets it through below one: so the bound is the least number beside it.

Integers that nobody bounds stay within those that doubles tell apart, as RFC 8259 (section 6) has them for JSON that
many may read: a small model that has begun with digits writes them until its answer is cut.
"""

from __future__ import annotations

import math
from typing import Any

from models.text.json_schemas import Schema, narrowed, rewritten

_SURE_DIGITS = 15
_MOST_DECIMALS = 10
"""What llguidance can count."""
_LEAST_BOUND = 1e-6
"""Below it the digits that matter stand behind those that are counted."""
_LEAST_ROOM = 1e-6
_LEAST_NUMBER = 1e-30
"""Beside a zero that is excluded; llguidance writes out each of its decimals."""
_EXACT = 2**53
_MOST_WHOLE = 2**63
"""From here on llguidance takes no bounds: it says so."""
_EXCLUSIVE = (("exclusiveMinimum", "minimum", math.inf), ("exclusiveMaximum", "maximum", -math.inf))
_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)


def with_whole_counts(schema: Any) -> Any:
    """Return a schema whose counts are written as integers: `2.0` is one too, and llguidance takes it for none."""
    return rewritten(schema, _whole_counts)


def _whole_counts(schema: Schema) -> Schema:
    counts = {name: schema[name] for name in _COUNTS if isinstance(schema.get(name), float)}
    whole = {name: int(count) for name, count in counts.items() if count.is_integer()}
    return {**schema, **whole} if whole else schema


def as_doubles(schema: Any) -> Any:
    """Return a schema of which every number, read as a double, keeps the bounds of `schema`.

    The very same object where nothing has to be said for that. Bounds that are excluded and nearer to zero than a
    millionth, but not zero, stay as they are.
    """
    return rewritten(schema, _bounded)


def _bounded(schema: Schema) -> Schema:
    """Return a schema with bounds that decimals and doubles keep alike."""
    kinds = schema.get("type", "number")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not {"number", "integer"} & {kind for kind in kinds if isinstance(kind, str)}:
        return schema
    found, decimals = dict(schema), _MOST_DECIMALS
    cut = False
    for exclusive, inclusive, inwards in _EXCLUSIVE:
        bound = _number(found.get(exclusive))
        if bound is not None and _EXACT <= abs(bound) < _MOST_WHOLE:
            del found[exclusive]
            _tighten(found, inclusive, _double_inside(bound, inwards, excluded=True), inwards)
        elif bound is not None and _LEAST_BOUND <= abs(bound) < _EXACT:
            cut, decimals = True, min(decimals, _SURE_DIGITS - len(str(int(abs(bound)))))
        limit = _number(found.get(inclusive))
        if isinstance(limit, int) and _EXACT < abs(limit) < _MOST_WHOLE:
            found[inclusive] = _double_inside(limit, inwards, excluded=False)
    if "number" not in kinds:
        return schema if found == schema else found
    cut = cut and "multipleOf" not in found and _room(found) >= _LEAST_ROOM
    step = float(f"1e-{decimals}") if decimals > 0 else 1
    if cut:
        found["multipleOf"] = step
    for exclusive, inclusive, inwards in _EXCLUSIVE:
        least = step if cut else _LEAST_NUMBER
        if _number(found.get(exclusive)) == 0 and _room(found) > least:
            del found[exclusive]
            _tighten(found, inclusive, math.copysign(least, inwards), inwards)
    return schema if found == schema else found


def within_doubles(schema: Any) -> Any:
    """Return a schema whose integers all have bounds; the very same object where they had, or schemas are combined."""
    return narrowed(schema, _whole_within_doubles)


def _whole_within_doubles(schema: Schema) -> Schema:
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" not in kinds or "number" in kinds or {"const", "enum"} & schema.keys():
        return schema
    found = dict(schema)
    for exclusive, inclusive, inwards in _EXCLUSIVE:
        most = math.copysign(_EXACT - 1, -inwards)
        if _number(schema.get(exclusive)) is None and _number(schema.get(inclusive)) is None:
            found[inclusive] = int(most)
    return schema if found == schema or _room(found) < 1 else found


def _tighten(schema: Schema, name: str, bound: float, inwards: float) -> None:
    """Set a bound, where there is none yet that is tighter."""
    known = _number(schema.get(name))
    tighter = known is not None and (known > bound if inwards > 0 else known < bound)
    schema[name] = known if tighter else bound


def _double_inside(bound: float, inwards: float, *, excluded: bool) -> int | float:
    """Return the first double from a bound on, as a whole number where it is one."""
    nearest = float(bound)
    outside = nearest < bound if inwards > 0 else nearest > bound
    if outside or (excluded and nearest == bound):
        nearest = math.nextafter(nearest, inwards)
    return int(nearest) if nearest.is_integer() and abs(nearest) < _MOST_WHOLE else nearest


def _room(schema: Schema) -> float:
    """Return how far apart the bounds are."""
    lows = [_number(schema.get(name)) for name in ("minimum", "exclusiveMinimum")]
    highs = [_number(schema.get(name)) for name in ("maximum", "exclusiveMaximum")]
    low = max((one for one in lows if one is not None), default=-math.inf)
    return min((one for one in highs if one is not None), default=math.inf) - low


def _number(value: Any) -> int | float | None:
    """Return a bound; None for what is none, as `true` was in an older draft."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
