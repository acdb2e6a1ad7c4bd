"""The file of tenants and keys: read strictly, changed line by line, never showing a key."""

from __future__ import annotations

import datetime as dt
import os
import resource
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import ConfigError
from router.tenants.directory import Directory
from router.tenants.keys_edit import NewKey, add_key, read_keys, revoke, seal, set_limits
from router.tenants.keys_file import decode, digest_of
from router.tenants.tenant import Limits, Role

DIGEST = "ab" * 32
CLEAR = "0123456789abcdef-clear"


def test_a_file_says_who_may_come_in() -> None:
    found = decode(
        f"""
        # who may come in
        tenant acme priority=5 requests_per_minute=600 models=tiny,small-*   # the first
        key acme sha256:{DIGEST} created=2026-11-22
        key acme sha256:{"cd" * 32} device=bench-1
        cert acme sha256:{"ef" * 32} device=bench-2
        key ops sha256:{"01" * 32} role=operator
        {CLEAR} priority=3
        """.encode(),
        "keys",
    )
    assert found.limits_of("acme") == Limits(priority=5, requests_per_minute=600, models=("tiny", "small-*"))
    assert found.limits_of("ops") == Limits()
    assert [(key.tenant, key.kind, key.device, key.role) for key in found.keys.values()][:4] == [
        ("acme", "key", "", Role.CALLER),
        ("acme", "key", "bench-1", Role.CALLER),
        ("acme", "cert", "bench-2", Role.CALLER),
        ("ops", "key", "", Role.OPERATOR),
    ]
    clear = found.keys[digest_of(CLEAR.encode())]
    assert (clear.clear, clear.priority, clear.role, clear.number) == (True, 3, Role.MONITOR, 8)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("tenant", "expected a name"),
        ("tenant ../etc x=1", "expected a name"),
        ("tenant acme requests_per_minute=many", "requests_per_minute"),
        ("tenant acme requests=5", "requests"),
        ("tenant acme concurrency=0", "concurrency"),
        ("tenant acme priority=1 priority=2", "each once"),
        ("tenant acme\ntenant acme", "has a line already"),
        ("key acme", "expected `key NAME sha256:`"),
        ("key acme sha256:zz", "expected `key NAME sha256:`"),
        (f"key acme sha256:{DIGEST} rolle=operator", "`rolle=` is unknown"),
        (f"key acme sha256:{DIGEST} role=king", "role=king"),
        (f"key acme sha256:{DIGEST} created=yesterday", "created=yesterday"),
        (f"key acme sha256:{DIGEST}\nkey other sha256:{DIGEST}", "stands in line 1 already"),
        ("tooshort", "at least 16"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(line: str, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"keys:\d: .*{what}"):
        decode(line.encode(), "keys")


def _refusal(raw: bytes) -> str | None:
    try:
        decode(raw, "keys")
    except ConfigError as error:
        return error.message
    return None


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    refusal = _refusal(text.encode("utf-8", "surrogatepass"))
    assert refusal is None or refusal.startswith("keys")


@given(
    st.text(
        alphabet=st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="=#"), min_size=16, max_size=40
    )
)
def test_no_key_is_ever_quoted(key: str) -> None:
    for line in (f"tenant acme {key}", f"key acme {key}", f"key acme sha256:{DIGEST} {key}"):
        assert key not in (_refusal(line.encode()) or "")


def test_a_key_is_shown_once_and_kept_as_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key = add_key(path, NewKey("acme", "bench-1"), {"concurrency": 4}, today=lambda: dt.date(2026, 11, 22))
    text = path.read_text()
    assert key not in text
    assert f"key acme sha256:{digest_of(key.encode())} device=bench-1 created=2026-11-22" in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path).limits_of("acme").concurrency == 4


def test_changes_keep_comments_order_mode_and_everything_else(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# mine\ntenant acme priority=1 tokens_per_minute=10  # why\n\nkey acme sha256:{DIGEST}\n# end\n")
    path.chmod(0o640)
    assert set_limits(path, "acme", {"tokens_per_minute": None, "monthly_tokens": 99}) == Limits(
        priority=1, monthly_tokens=99
    )
    assert path.read_text() == f"# mine\ntenant acme priority=1 monthly_tokens=99\n\nkey acme sha256:{DIGEST}\n# end\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(ConfigError, match="there is no tenant `other`"):
        set_limits(path, "other", {"priority": 1})


def test_keys_are_revoked_by_id_or_by_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = [add_key(path, NewKey(name), {}) for name in ("acme", "acme", "other")]
    ids = [digest_of(key.encode())[:8] for key in keys]
    assert [key.short for key in revoke(path, ids[0])] == [ids[0]]
    assert [key.short for key in revoke(path, "acme")] == [ids[1]]
    assert [key.short for key in read_keys(path).keys.values()] == [ids[2]]
    with pytest.raises(ConfigError, match="no tenant and no key is `acme`"):
        revoke(path, "acme")
    with pytest.raises(ConfigError, match="no tenant and no key is"):
        revoke(path, ids[2][:2])


def test_a_broken_file_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("nonsense\n")
    with pytest.raises(ConfigError, match=f"{path}:1"):
        add_key(path, NewKey("acme"), {})
    path.write_text("tenant acme\n")
    with pytest.raises(ConfigError, match="concurrency"):
        add_key(path, NewKey("acme"), {"concurrency": -1})
    assert path.read_text() == "tenant acme\n"
    with pytest.raises(ConfigError, match="make its folder first"):
        add_key(tmp_path / "none" / "keys", NewKey("acme"), {})


def test_keys_in_clear_are_sealed_and_open_as_before(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{CLEAR} priority=3  # an edge\nanother-key-in-clear\n")
    assert len(seal(path)) == 2
    text = path.read_text()
    assert CLEAR not in text
    assert "# an edge" in text
    found = read_keys(path)
    key = found.keys[digest_of(CLEAR.encode())]
    assert (key.clear, key.role, found.limits_of(key.tenant).priority) == (False, Role.MONITOR, 3)
    assert seal(path) == []


def test_two_who_add_at_once_both_succeed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    threads = [threading.Thread(target=add_key, args=(path, NewKey(f"t{n}"), {"priority": n})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.tenant for key in read_keys(path).keys.values()} == {f"t{n}" for n in range(8)}


def test_a_disk_that_takes_a_part_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for number in range(20):
        add_key(path, NewKey(f"tenant-{number}"), {})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(ConfigError, match="cannot write"):
            add_key(path, NewKey("one-more"), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before


@pytest.mark.parametrize("what", ["a folder", "a pipe", "too large"])
async def test_what_stands_in_the_place_of_the_file_changes_nothing(tmp_path: Path, what: str) -> None:
    path = tmp_path / "keys"
    key = add_key(path, NewKey("acme"), {})
    directory = Directory(path=path)
    directory.load()
    path.rename(tmp_path / "good")
    if what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)  # a sparse file: read whole, it would take all the memory there is
    await directory.refresh(path)
    assert directory.fault
    assert directory.by_key(key.encode()) is not None
    path.rmdir() if what == "a folder" else path.unlink()
    (tmp_path / "good").rename(path)
    await directory.refresh(path)
    assert (directory.fault, directory.by_key(key.encode()) is not None) == ("", True)
