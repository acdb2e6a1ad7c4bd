"""`[[backends]]`: what is wrong in it is said with the key, the value and the remedy."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.upstream.settings import BackendSettings, check_backends

URL = "http://10.0.0.5:8000"


def read(**given: Any) -> BackendSettings:
    return msgspec.convert({"name": "b", **given}, BackendSettings)


def test_the_least_entry_is_a_name_and_where() -> None:
    found = read(urls=[URL])
    assert (found.kind, found.server, found.warm_up, found.local) == ("openai", "auto", True, False)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "give one of `urls`, `dns` and `file`; here is none"),
        ({"urls": [URL], "file": "x"}, "here is `urls` and `file`"),
        ({"urls": ["ftp://a"]}, "backend b: urls: "),
        ({"urls": ["http://user:secret@a:1"]}, "api_key"),
        ({"dns": "https://vllm.svc"}, "which no certificate names"),
        ({"name": "a b", "urls": [URL]}, "`name` = 'a b'"),
        ({"name": "", "urls": [URL]}, "`name` = ''"),
        ({"name": "x/y", "urls": [URL]}, "letters, digits"),
        ({"urls": [URL], "models": [{"served": "m"}, {"served": "m"}]}, "`models` lists m twice"),
        ({"urls": [URL], "models": [{"served": ""}]}, r"models\[0\].served"),
        ({"urls": [URL], "models": [{"served": "m", "quality": 1.5}]}, "quality"),
        ({"urls": [URL], "models": [{"served": "m", "slots": 0}]}, "slots"),
        ({"urls": [URL], "server": "tgi2"}, "server"),
        ({"urls": [URL], "kind": "grpc"}, "kind"),
        ({"urls": [URL], "refresh": 5}, "refresh"),
        ({"urls": [URL], "poll_interval_s": 0}, "poll_interval_s"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=why) as raised:
        read(**given)
    assert "secret" not in str(raised.value)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two are called b"):
        check_backends([read(urls=[URL]), read(file="x")])
    check_backends([read(urls=[URL]), read(name="c", urls=[URL])])
