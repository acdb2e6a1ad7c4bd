"""What operators configure and nobody may read: keys that are hard to guess, and URLs that carry no secret."""

from __future__ import annotations

from urllib.parse import urlsplit

from router.base.errors import ConfigError

MIN_KEY_CHARS = 16


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


def url_fault(url: str) -> str:
    """Say what is wrong with the base URL of an upstream, without quoting it where it may hold a secret; else empty.

    The URL names the upstream in logs, metrics, errors and reports to the fleet.
    """
    if "@" in url:
        return (
            "it holds an `@`: user name and password do not belong into a URL that logs and reports quote; "
            "take them out and put the key into upstream.api_key"
        )
    try:
        parts = urlsplit(url)
        sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or any(c.isspace() for c in url):
        return f"`{url[:200]}`: expected a URL such as https://cloud.example:8700"
    if parts.query or parts.fragment:
        return "it ends in a query or a fragment: give the base URL alone, and a key as upstream.api_key"
    return ""
