"""Keys that are hard to guess, and URLs that may be quoted."""

from __future__ import annotations

import msgspec
import pytest

from router.base.config import decode
from router.base.credentials import checked_key, url_fault
from router.base.errors import ConfigError


def test_a_key_is_long_enough_and_fits_a_header() -> None:
    assert checked_key("0123456789abcdef", "here", "keys") == "0123456789abcdef"
    for wrong in ("", "s3cret", "s3cret-012345678\n", "s3cret 0123456789", "s3cret-schlüssel-1"):
        with pytest.raises(ConfigError, match="here: an API key needs") as raised:
            checked_key(wrong, "here", "keys")
        assert raised.value.param == "keys"
        assert "s3cret" not in raised.value.message


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("https://cloud.example:8700", ""),
        ("http://10.0.0.5:8700/v1/", ""),
        ("http://[::1]:8700", ""),
        ("https://u:p@cloud", "an `@`"),
        ("cloud:8700", "expected a URL"),
        ("ftp://cloud", "expected a URL"),
        ("https://", "expected a URL"),
        ("https://cloud:port", "expected a URL"),
        ("https://cloud:99999", "expected a URL"),
        ("https://[cloud", "expected a URL"),
        ("https://a b", "expected a URL"),
        ("https://cloud?key=s", "a query"),
    ],
)
def test_a_url_names_an_upstream_and_nothing_else(url: str, fault: str) -> None:
    assert fault in url_fault(url)
    assert bool(url_fault(url)) == bool(fault)


def test_an_error_shows_nothing_of_a_value_that_may_hold_a_password() -> None:
    class Shape(msgspec.Struct, forbid_unknown_fields=True):
        broker: int = 0

    with pytest.raises(ConfigError, match="…@host") as raised:
        decode({"broker": "mqtt://u:hunter2@host"}, Shape, source="a.toml")
    assert "hunter2" not in raised.value.message
