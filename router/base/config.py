"""Strict configuration: TOML, then environment, then flags, decoded into frozen msgspec structs.

An unknown key, a wrong type or a value out of range is a `ConfigError` that names the key, the value, where it was set
(the line of the file, the variable or the flag) and the remedy.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from router.base.errors import ConfigError
from router.base.shapes import Key, Misfit, dotted, keys_of, misfit
from router.base.toml_lines import line_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

_SECRET = re.compile(r"key|secret|(?<!kilo)token$|password", re.IGNORECASE)
_MAX_SHOWN_CHARS = 60


class Flag(NamedTuple):
    """A value of the command line, and the option that gave it."""

    name: str
    value: object


class Overlaid(dict[str, Any]):
    """A tree that remembers which of its values came from elsewhere than the file.

    Attributes:
        origins: key → (name of the variable or flag, its text as given; None for a flag that was no text).
        beside: variables that have the prefix and yet name no key, by what stands behind the prefix.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        super().__init__(tree)
        self.origins: dict[Key, tuple[str, str | None]] = {}
        self.beside: dict[str, str] = {}


def load(
    path: Path,
    shape: type[T],
    *,
    env_prefix: str | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Flag] | None = None,
) -> T:
    """Read `path` and lay environment variables and flags over it.

    Args:
        shape: a msgspec.Struct declared with `forbid_unknown_fields=True`.
        env_prefix: `OVERSPILL_EDGE` makes `OVERSPILL_EDGE__ROUTER__POLICY=…` set `router.policy`.
        flags: dotted key → option; those without a value are skipped.

    Raises:
        ConfigError: the file is missing, is no TOML, or does not fit `shape`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a configuration") from None
    return decode(overlay(tree, env_prefix, environ, flags), shape, source=str(path), text=text)


def overlay(
    tree: Mapping[str, Any],
    env_prefix: str | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Flag] | None = None,
) -> dict[str, Any]:
    """Return `tree` with the environment's and the flags' values laid over it; `tree` stays as it is.

    Raises:
        ConfigError: a variable or flag names no key, or a key below a single value.
    """
    merged = Overlaid(_copy(tree))
    if env_prefix is not None:
        marker = env_prefix + "__"
        for name in sorted(environ):
            if name.startswith(marker):
                keys = name[len(marker) :].lower().split("__")
                _put(merged, keys, _toml_value(environ[name]), (name, environ[name]))
            elif name.startswith(f"{env_prefix}_"):
                merged.beside[name] = name[len(env_prefix) + 1 :]
    for at, flag in (flags or {}).items():
        if flag.value is not None:
            _put(merged, at.split("."), flag.value, (flag.name, None))
    return merged


def decode(tree: Mapping[str, Any], shape: type[T], *, source: str, text: str | None = None) -> T:
    """Decode a mapping into `shape`.

    A variable whose text reads as a number or a boolean is taken as text where `shape` wants text.

    Args:
        source: what to call it in an error (a path, `desired v7`).
        text: the TOML it was read from, to name the line.

    Raises:
        ConfigError: it does not fit.
    """
    _check_finite(tree, source, text)
    if isinstance(tree, Overlaid):
        _check_beside(tree, shape)
    try:
        return msgspec.convert(tree, shape, strict=True)
    except msgspec.ValidationError as error:
        found = misfit(tree, shape) or Misfit((), str(error))
        as_text = _as_text(tree, found)
        if as_text is None:
            raise _explain(found, tree, source, text) from error
    return decode(as_text, shape, source=source, text=text)


@contextlib.contextmanager
def naming_origins(
    path: Path | None,
    shape: type[msgspec.Struct],
    *,
    env_prefix: str,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Flag] | None = None,
) -> Iterator[None]:
    """Say where a key was set that turns out to be wrong after it was decoded, when it met this machine.

    Args:
        path, env_prefix, environ, flags: that `shape` was read from; see `load`.

    Raises:
        ConfigError: of the block, with the line, the variable or the flag in front.
    """
    try:
        yield
    except ConfigError as error:
        key = _key_of(error.param or "")
        if error.placed or key[:1] not in {(field.encode_name,) for field in msgspec.structs.fields(shape)}:
            raise
        text = "" if path is None else path.read_text(encoding="utf-8-sig")
        place = _place(overlay({}, env_prefix, environ, flags), "" if path is None else str(path), text, key)
        raise (_placed(place, error.message, key) if place else error) from error


def _key_of(named: str) -> Key:
    """Read a key as `dotted` writes it."""
    return tuple([int(step) if step.isdecimal() else step for step in re.findall(r"[^.\[\]]+", named)])


def _placed(place: str, what: str, key: Key) -> ConfigError:
    error = ConfigError(f"{place}: {what}", param=dotted(key) or None)
    error.placed = True
    return error


def file_of(text: str | None) -> Path | None:
    """Return the file or folder that a setting names, None where it names none."""
    return Path(text).expanduser() if text else None


def _as_text(tree: Any, found: Misfit) -> Overlaid | None:
    """Return the tree with the variable at fault taken literally, None if the fault is another."""
    key = found.key if found.wants_text else ()
    name, raw = tree.origins.get(key, ("", None)) if isinstance(tree, Overlaid) else ("", None)
    if raw is None:
        return None
    changed = Overlaid(_copy(tree))
    changed.origins = {**tree.origins, key: (name, None)}
    parent: Any = changed
    for step in key[:-1]:
        parent = parent[step]
    parent[key[-1]] = raw
    return changed


def _explain(found: Misfit, tree: Any, source: str, text: str | None) -> ConfigError:
    key, what = found.key, found.what
    if found.unknown is not None:
        key = (*key, found.unknown)
        close = difflib.get_close_matches(found.unknown, found.known, n=1)
        remedy = f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(found.known) or 'none'}"
        return _placed(_place(tree, source, text, key), f"unknown key `{dotted(key)}`; {remedy}", key)
    place = _place(tree, source, text, key, what)
    if key and what.startswith(f"{dotted(key)}."):  # a table's own check has named its key
        return _placed(place, what, key)
    shown = f"`{dotted(key)}`{_shown(tree, key)}" if key else "`(top level)`"
    return _placed(place, f"{shown}: {what}", key)


def _check_beside(tree: Overlaid, shape: type) -> None:
    """Refuse a variable that all but names a key: passed over in silence, a lost `local-only` sends out what must stay.

    One that the configuration itself reads (`env:NAME`) has whatever name its owner gave it.
    """
    if not tree.beside:
        return
    named = {"_".join(key): key for key in keys_of(shape) if len(key) > 1}
    read = {value.removeprefix("env:") for _, value in _leaves(tree, ()) if isinstance(value, str)}
    for name, rest in tree.beside.items():
        key = named.get(re.sub("_+", "_", rest.lower()))
        if key is not None and name not in read:
            meant = "__".join((name[: -len(rest) - 1], *(step.upper() for step in key)))
            raise _placed(name, f"unknown variable; two underscores stand for each dot: did you mean {meant}?", key)


def _check_finite(tree: Mapping[str, Any], source: str, text: str | None) -> None:
    """TOML knows `nan` and `inf`, and no bound of a struct refuses a nan."""
    for key, value in _leaves(tree, ()):
        if isinstance(value, float) and not math.isfinite(value):
            where = _place(tree, source, text, key)
            raise _placed(where, f"`{dotted(key)}` = {value}: Expected a finite number", key)


def _leaves(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from _leaves(child, (*key, name))
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _leaves(child, (*key, index))
    else:
        yield key, value


def _shown(tree: Any, key: Key) -> str:
    """Return ` = value` for a message; nothing for tables, and nothing that might be a secret."""
    found = [value for at, value in _leaves(tree, ()) if at == key]
    if not found or any(_SECRET.search(str(step)) for step in key):
        return ""
    value = found[0]
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    if "@" in text:  # what stands before it may be a password
        text = f"'…@{text.rpartition('@')[2]}"
    return f" = {text}" if len(text) <= _MAX_SHOWN_CHARS else f" = {text[: _MAX_SHOWN_CHARS - 1]}…"


def _place(tree: Any, source: str, text: str | None, key: Key, what: str = "") -> str:
    """Name the variable or flag that set a key, or the part of it that `what` names; else the line, else the source."""
    origins = tree.origins if isinstance(tree, Overlaid) else {}
    for length in range(len(key), 0, -1):
        if key[:length] in origins:
            return str(origins[key[:length]][0])
    for at, (name, _) in reversed(origins.items()):
        if at[: len(key)] == key and re.search(rf"\b{re.escape(str(at[-1]))}\b", what):
            return name
    line = line_of(text, key) if text else None
    return f"{source}:{line}" if line else source


def _toml_value(raw: str) -> object:
    """Read an environment value as TOML (`3`, `true`, `["a"]`), and as a plain string where it is none."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    return parsed["value"] if len(parsed) == 1 else raw


def _put(tree: Overlaid, keys: Sequence[str], value: object, origin: tuple[str, str | None]) -> None:
    if not all(keys):
        raise ConfigError(f"{origin[0]}: names no key; expected PREFIX__SECTION__KEY", param=origin[0])
    below: dict[str, Any] = tree
    for key in keys[:-1]:
        below = below.setdefault(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{origin[0]}: `{key}` is a value, not a table", param=origin[0])
    below[keys[-1]] = value
    tree.origins[tuple(keys)] = origin


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in tree.items()}
