"""What an operator types, as a tree of edits: `key.path=value` with TOML values, `--unset`, and files."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.base.errors import ConfigError
from router.fleetwire.documents import check_overridable
from router.fleetwire.overrides import leaves

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_edits(assignments: Sequence[str], unset: Sequence[str] = (), file: Path | None = None) -> dict[str, Any]:
    """Return one tree: the file, then the assignments over it, then the removals (None).

    Raises:
        ConfigError: no assignment, a key outside what a device may be told, or a file that is no TOML or JSON.
    """
    tree = _read_file(file) if file is not None else {}
    for assignment in assignments:
        key, found, text = assignment.partition("=")
        if not found or not key.strip():
            raise ConfigError(f"{assignment!r} is no assignment; write key=value, such as router.max_queue=32")
        tree = _merge(tree, _nested(key.strip(), read_value(text)))
    for key in unset:
        tree = _merge(tree, _nested(key.strip(), None))
    check_overridable(tree)
    for table, value in tree.items():
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"`{table}` is a table; name a key in it, such as {table}.KEY=VALUE", param=table)
    for key, value in leaves(tree):
        _require_json(key, value)
    return tree


def _require_json(key: str, value: object) -> None:
    """Refuse what JSON cannot say: NaN and infinity would go out as null, which takes the override away."""
    if isinstance(value, list):
        for item in value:
            _require_json(key, item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"`{key}` = {value}: a document holds finite numbers only", param=key)


def read_value(text: str) -> object:
    """Read a value as TOML; `null` takes an override away, and what is no TOML is a plain string."""
    if text.strip() == "null":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nested(key: str, value: object) -> dict[str, Any]:
    parts = key.split(".")
    if not all(parts):
        raise ConfigError(f"key {key!r} has an empty part", param=key)
    tree: object = value
    for part in reversed(parts):
        tree = {part: tree}
    return tree if isinstance(tree, dict) else {}


def _merge(tree: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Lay edits over edits; unlike `overrides.edit`, nulls stay, for they are edits themselves."""
    merged = dict(tree)
    for key, value in more.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param="file") from error
    try:
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: neither valid TOML nor, as .json, valid JSON: {error}", param="file") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected tables such as [router], found a {type(tree).__name__}", param="file")
    for envelope in ("version", "issued_at", "issued_by"):  # so that the output of `fleet get --json` can be edited
        tree.pop(envelope, None)
    return tree
