"""The example documents every key; mistakes are named; nothing is open to the network by accident."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_agent.config import EdgeConfig, GatewaySettings, UpstreamSettings, key_sources, load_config
from router.base.config import Flag, decode
from router.base.credentials import secret
from router.base.errors import ConfigError
from router.base.loopback import is_loopback
from tests.support.paths import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "edge.toml"


def test_the_example_is_the_default() -> None:
    assert load_config(EXAMPLE, environ={}) == EdgeConfig()


def _within(annotation: object) -> Iterator[object]:
    yield annotation
    for item in getattr(annotation, "__args__", ()):
        yield from _within(item)


def _keys(shape: type, prefix: str = "") -> set[str]:
    found = set()
    for field in msgspec.structs.fields(shape):
        inner = [item for item in _within(field.type) if isinstance(item, type)]
        table = next((item for item in inner if issubclass(item, msgspec.Struct)), None)
        found |= _keys(table, f"{prefix}{field.name}.") if table else {f"{prefix}{field.name}"}
    return found


def test_the_example_names_every_key() -> None:
    table, named = "", set()
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        header = re.match(r"#? ?\[+([a-z.]+)\]", line)
        key = re.match(r"#? ?([a-z_]+) = ", line)
        if header:
            table = header[1]
        elif key:
            named.add(f"{table}.{key[1]}")
    assert named == _keys(EdgeConfig)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "edge.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[agent]\nprofil = 'auto'", r"edge.toml:2: unknown key `agent.profil`; did you mean `profile`"),
        ("[gateway]\nport = 70000", "gateway.port"),
        ("[gateway]\nport = '8600'", "gateway.port"),
        ("[models]\nkv_slots = -1", "models.kv_slots"),
        ("[models]\npreload = ['other']", "preload names other"),
        ("[upstream]\nurl = 'cloud:8700'", "upstream.url"),
        ("[upstream]\nurl = 'http://cloud:8700/v1/'", "ends in /v1: give the base URL"),
        ("[agent]\nlog_level = 'loud'", "expected one of 'debug', 'error', 'info', 'warning'"),
        ("[router]\npolicy = 'best'", "best"),
        ("[router.prices]\ncloud_kilotoken = 'dear'", "cloud_kilotoken` = 'dear'"),  # no secret, for all its name
        ("[gateway]\nhost = '0.0.0.0'", "gateway.api_keys"),
        ("[gateway]\nhost = '192.168.1.5'", "reached from other machines"),
        ("gateway = 3", "gateway"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), environ={})


def test_environment_lies_over_the_file_and_flags_over_both(tmp_path: Path) -> None:
    path = write(tmp_path, "[gateway]\nport = 1\n")
    environ = {"OVERSPILL_EDGE__GATEWAY__PORT": "2", "OVERSPILL_EDGE__MODELS__VARIANTS": "[]"}
    assert load_config(path, environ={}).gateway.port == 1
    assert load_config(path, environ=environ).gateway.port == 2
    assert load_config(path, environ=environ, flags={"gateway.port": Flag("--port", 3)}).gateway.port == 3
    assert load_config(None, environ={}, flags={"gateway.port": Flag("--port", None)}) == EdgeConfig()


def test_a_key_opens_the_door_to_the_network(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "[gateway]\nhost = '0.0.0.0'\napi_keys = ['env:KEY']"), environ={})
    assert secret(config.upstream.api_key, "upstream.api_key", {}) == ""
    opened = key_sources(config.gateway, {"KEY": "0123456789abcdef"}).directory()
    assert opened.by_key(b"0123456789abcdef").max_priority == 0
    gateway = GatewaySettings(api_keys=("env:KEY priority=5", "fedcba9876543210"), max_priority=-1)
    found = key_sources(gateway, {"KEY": "0123456789abcdef"}).directory()
    assert [found.by_key(key).max_priority for key in (b"0123456789abcdef", b"fedcba9876543210")] == [5, -1]
    with pytest.raises(ConfigError, match=r"api_keys\[0\]: environment variable KEY is not set"):
        key_sources(config.gateway, {})


@pytest.mark.parametrize(
    "key", ["s3cret", "s3cret-01234567", "s3cret 012345678", "s3crét-0123456789", "s3cret-0123456789\n"]
)
def test_a_key_that_opens_the_door_is_hard_to_guess(key: str) -> None:
    for gateway in (GatewaySettings(api_keys=(key,)), GatewaySettings(api_keys=("env:KEY",))):
        with pytest.raises(ConfigError, match=r"gateway.api_keys\[0\]: .* at least 16") as raised:
            key_sources(gateway, {"KEY": key})
        assert "s3cret" not in raised.value.message


@pytest.mark.parametrize(
    "url", ["https://user:hunter2@host:8700", "hunter2@host", "https://u:hunter2/@host", "x://a:hunter2@h"]
)
def test_a_url_with_a_password_is_refused_unread(tmp_path: Path, url: str) -> None:
    for environ, text in (({}, f"[upstream]\nurl = '{url}'"), ({"OVERSPILL_EDGE__UPSTREAM__URL": url}, "")):
        with pytest.raises(ConfigError, match=r"upstream\.api_key") as raised:
            load_config(write(tmp_path, text), environ=environ)
        assert "hunter2" not in raised.value.message


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104
        ("edge.local", False),
    ],
)
def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("text", "at_start"),
    [
        ("", ("smollm2-135m-int8",)),
        ("[models]\nvariants = []", ()),
        ("[models]\nvariants = ['own-int8', 'own-pruned-int8']", ("own-int8",)),
        ("[models]\nvariants = ['own-int8']\npreload = []", ()),
    ],
)
def test_the_first_variant_is_loaded_at_start_unless_said_otherwise(
    tmp_path: Path, text: str, at_start: tuple[str, ...]
) -> None:
    assert load_config(write(tmp_path, text), environ={}).models.at_start == at_start


@pytest.mark.parametrize("name", ["variants", "preload"])
def test_a_variant_listed_twice_is_refused_by_name(name: str) -> None:
    tree = {"variants": ["a", "b"], "preload": ["a"]}
    tree[name] = [*tree[name], "a"]
    with pytest.raises(ConfigError, match=f"{name} lists a twice"):
        decode({"models": tree}, EdgeConfig, source="desired version 3")


def test_a_file_nested_without_end_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "edge.toml"
    path.write_text("a=" + "[" * 3000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config(path)


def test_private_copies_go_where_the_service_manager_says() -> None:
    settings = EdgeConfig().agent
    assert settings.cache_path({"CACHE_DIRECTORY": "/var/cache/overspill:/other"}) == Path(
        "/var/cache/overspill/serving"
    )
    assert settings.cache_path({"XDG_CACHE_HOME": "/x"}) == Path("/x/overspill/serving")
    assert settings.cache_path({}) == Path.home() / ".cache" / "overspill" / "serving"
    assert msgspec.structs.replace(settings, cache_dir="/own").cache_path({"CACHE_DIRECTORY": "/c"}) == Path("/own")


def test_what_is_no_origin_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "edge.toml"
    path.write_text('[cors]\nallow_origins = ["https://app.example/"]\n')
    with pytest.raises(ConfigError, match=r"cors.*no origin"):
        load_config(path)
    path.write_text('[cors]\nallow_origins = ["https://app.example"]\n')
    assert load_config(path).cors.allow_origins == ("https://app.example",)


@pytest.mark.parametrize(
    ("upstream", "seconds"),
    [({}, 0.0), ({"price_per_mbyte": 0.01}, 30.0), ({"price_per_mbyte": 0.01, "idle_poll_interval_s": 5.0}, 5.0)],
)
def test_a_metered_link_is_polled_seldom_while_nobody_uses_it(upstream: dict[str, Any], seconds: float) -> None:
    assert UpstreamSettings(**upstream).unused_poll_s == seconds
