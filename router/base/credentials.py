"""What operators configure and nobody may read: keys that are hard to guess, and URLs that carry no secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from router.base.errors import ConfigError

MIN_KEY_CHARS = 16
MAX_PRIORITY = 2**31 - 1
_PRIORITY = re.compile(r"priority=(-?[0-9]{1,10})")


def checked_key(key: str, where: str, param: str) -> str:
    """Return an API key that may open a tier.

    Args:
        where: the place that it was read from, for the error.
        param: the configuration key at fault.

    Raises:
        ConfigError: it is too short, or holds what no header can carry; the message never holds the key.
    """
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{where}: an API key needs at least {MIN_KEY_CHARS} printable ASCII characters without blanks "
            "(for example: openssl rand -hex 24)",
            param=param,
        )
    return key


def key_ceilings(words: Iterable[tuple[str, str]], param: str) -> dict[str, int | None]:
    """Read keys, each perhaps with the highest priority that it may claim: `KEY priority=5`. None: it says nothing.

    A key that is given twice may claim the lowest that is said of it.

    Args:
        words: (where it stands, a key or the `priority=` of the key before it).
        param: the configuration key at fault.

    Raises:
        ConfigError: a key is none, or a priority is no number or follows no key; the message never holds a key.
    """
    entries: list[tuple[str, int | None]] = []
    for where, word in words:
        if not word.startswith("priority="):
            entries.append((checked_key(word, where, param), None))
            continue
        given = _PRIORITY.fullmatch(word)
        if not entries or given is None or abs(int(given[1])) > MAX_PRIORITY:
            raise ConfigError(f"{where}: expected a key and then, say, `priority=5`: a 32-bit integer", param=param)
        entries[-1] = (entries[-1][0], int(given[1]))
    found: dict[str, int | None] = {}
    for key, ceiling in entries:
        said = [each for each in (ceiling, found.get(key)) if each is not None]
        found[key] = min(said, default=None)
    return found


def url_fault(url: str, key: str = "upstream.api_key") -> str:
    """Say what is wrong with the base URL of an upstream, without quoting it where it may hold a secret; else empty.

    The URL names the upstream in logs, metrics, errors and reports to the fleet.

    Args:
        key: where its secret belongs.
    """
    if "@" in url:
        return (
            "it holds an `@`: user name and password do not belong into a URL that logs and reports quote; "
            f"take them out and put the key into {key}"
        )
    try:
        parts = urlsplit(url)
        sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or any(c.isspace() for c in url):
        return f"`{url[:200]}`: expected a URL such as https://cloud.example:8700"
    if parts.query or parts.fragment:
        return f"it ends in a query or a fragment: give the base URL alone, and a key as {key}"
    return ""


def secret(value: str, key: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a key to be sent in a header: `value`, or what the environment holds under NAME for `env:NAME`.

    Raises:
        ConfigError: the variable is not set, or no header can carry the key; it is never in the message.
    """
    found = resolved(value, key, environ)
    if not found.isascii() or not found.isprintable() or " " in found:
        raise ConfigError(f"{key}: a key is made of printable ASCII characters without blanks; this is not", param=key)
    return found


def resolved(value: str, key: str, environ: Mapping[str, str]) -> str:
    """Return `value`, or what the environment holds under NAME for `env:NAME`.

    Raises:
        ConfigError: the variable is not set or empty.
    """
    if not value.startswith("env:"):
        return value
    name = value.removeprefix("env:")
    found = environ.get(name, "")
    if not found:
        raise ConfigError(f"{key}: environment variable {name} is not set or empty", param=key)
    return found
