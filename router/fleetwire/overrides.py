"""How remote overrides meet a tier's own configuration file: the merge, and the difference. Pure functions.

Merge semantics, for each key of an override tree over a base tree:

- a table over a table merges key by key, to any depth;
- anything else (number, text, boolean, array) replaces the base's value whole; arrays are never joined;
- null means "no override here": the base's value stays in force;
- a table over a value replaces it (and then most likely fails validation, which names the key).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def lay_over(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `overrides` laid over it; neither argument changes, nor is shared with the result's tables."""
    merged = {key: lay_over(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in overrides.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = lay_over(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def edit(overrides: Mapping[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's override tree after `edits`: like `lay_over`, but null takes the override away.

    Tables that become empty disappear.
    """
    edited = {key: edit(value, {}) if isinstance(value, Mapping) else value for key, value in overrides.items()}
    for key, value in edits.items():
        if value is None:
            edited.pop(key, None)
        elif isinstance(value, Mapping):
            below = edited.get(key)
            edited[key] = edit(below if isinstance(below, Mapping) else {}, value)
        else:
            edited[key] = value
    return {key: value for key, value in edited.items() if not (isinstance(value, Mapping) and not value)}


@dataclass(frozen=True, slots=True)
class Difference:
    """One override that is not in force; `reported` is None when the device does not know the key."""

    key: str
    desired: object
    reported: object


def delta(overrides: Mapping[str, Any], effective: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the overrides whose value differs from the configuration in force; empty means converged."""
    flat = dict(leaves(effective))
    return tuple(
        Difference(key, value, flat.get(key))
        for key, value in leaves(overrides)
        if value is not None and flat.get(key) != value
    )


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is no table with its dotted key."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
