"""Where links in requests may lead: read as no program could read them otherwise."""

from __future__ import annotations

import pytest

from router.base.errors import InvalidRequest
from router.gateway.links import Links, MediaSettings
from router.values.feature import Feature
from router.values.prompt import ChatPrompt, MediaPart, Message, TextPrompt


def linking(url: str) -> ChatPrompt:
    part = MediaPart(Feature.IMAGES, b"{}", url)
    return ChatPrompt((Message("user", "", parts=("see", part)),), media=frozenset({Feature.IMAGES}))


def passes(url: str, *origins: str) -> bool:
    try:
        Links(MediaSettings(allow_origins=origins)).check(linking(url))
    except InvalidRequest:
        return False
    return True


NAMED = ("https://images.example", "https://*.cdn.example:8443", "http://10.0.0.5:9000", "https://[2001:db8::1]")


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example",
        "https://images.example/a/b.png?c=d&e=@f#g",
        "HTTPS://Images.Example./a.png",
        "https://images.example:443/a.png",
        "https://eu.cdn.example:8443/a.png",
        "https://a.b.cdn.example:8443/",
        "http://10.0.0.5:9000/a.png",
        "https://[2001:DB8::1]/a.png",
    ],
)
def test_what_the_operator_names_is_passed_on(url: str) -> None:
    assert passes(url, *NAMED)
    assert not passes(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example/",
        "https://images.example:8443/",
        "https://cdn.example:8443/",
        "https://.cdn.example:8443/",
        "https://evilcdn.example:8443/",
        "https://eu.cdn.example/",
        "https://images.example@evil.example/",
        "https://evil.example\\@images.example/",
        "https://images.example\\.evil.example/",
        "https://evil.example/https://images.example",
        "https://evil.example#@images.example",
        "https://images.example:443:80/",
        "https://images.example.evil.example/",
        "http://10.0.0.5:9000@evil.example/",
        "http://10.0.0.5/",
        "https:/images.example/",
        "https://",
        "https://im\u00e4ges.example/",
        "http\u017f://images.example/",
        "https://image\u017f.example/",
    ],
)
def test_what_only_looks_like_it_is_not(url: str) -> None:
    assert not passes(url, *NAMED)


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("https://example.com/a.png", True),
        ("http://1.1.1.1/a.png", True),
        ("https://[2606:4700::1]/", True),
        ("http://127.0.0.1/", False),
        ("http://10.1.2.3/", False),
        ("http://169.254.169.254/latest", False),
        ("http://[::1]/", False),
        ("http://[::ffff:10.0.0.1]/", False),
        ("http://[fe80::1]/", False),
        ("http://2130706433/", False),
        ("http://127.1/", False),
        ("http://0x7f.0.0.1/", False),
        ("http://0x7f000001/", False),
        ("http://localhost/", False),
        ("http://printer/", False),
        ("http://nas.local/", False),
        ("http://metadata.google.internal/", False),
        ("http://224.0.0.1/", False),
        ("http://www.localho\u017ft/", False),  # a long s, which programs take for one
        ("http://[64:ff9b::7f00:1]/", False),  # 127.0.0.1 behind a translator of addresses
        ("http://[2002:7f00:1::]/", False),
        ("http://[::127.0.0.1]/", False),
    ],
)
def test_every_public_host_is_no_private_one(url: str, public: bool) -> None:
    assert passes(url, "*") is public


def test_a_private_host_beside_every_public_one_is_named() -> None:
    assert passes("http://nas.local/a.png", "*", "http://nas.local")


@pytest.mark.parametrize(
    "origin", ["images.example", "https://images.example/", "ftp://images.example", "https://*", ""]
)
def test_what_is_no_origin_is_refused_by_name(origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin: write scheme, host and port"):
        MediaSettings(allow_origins=(origin,))


def test_what_links_to_nothing_is_let_through() -> None:
    links = Links(MediaSettings())
    links.check(TextPrompt("https://example.com"))
    links.check(ChatPrompt((Message("user", "https://example.com"),)))
    links.check(linking(""))
