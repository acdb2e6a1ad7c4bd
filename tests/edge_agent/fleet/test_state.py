"""What survives a restart, and what a failing disk may not do; the `[fleet]` table."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.fleet.effective import tellable
from edge_agent.fleet.reconcile import Knowledge, Refuse, applied, begin, reconcile, refused
from edge_agent.fleet.state import StateDir, write_atomically
from edge_agent.mqtt.config import FleetConfig, FleetTls
from router.base.config import decode
from router.base.errors import ConfigError
from router.fleetwire.documents import DesiredConfig
from tests.support.disks import small_disk

WANTED = DesiredConfig(version=4, issued_at=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc), router={"a": {"b": [1]}})


def test_knowledge_survives_a_restart(tmp_path: Path) -> None:
    known = refused(applied(Knowledge(), WANTED), Refuse(5, "sha256:x", "no", "router.a"))
    action = reconcile(known, DesiredConfig(version=6, issued_at=WANTED.issued_at))
    known = begin(known, action)  # type: ignore[arg-type]
    first = StateDir(tmp_path / "deep" / "state")
    first.open()
    assert first.save(known)
    first.close()
    second = StateDir(tmp_path / "deep" / "state")
    second.open()
    assert second.load() == known
    second.close()


def test_birth_counts_over_restarts(tmp_path: Path) -> None:
    births = []
    for _ in range(3):
        state = StateDir(tmp_path)
        state.open()
        births += [state.next_birth(), state.next_birth()]
        state.close()
    assert births == [1, 2, 3, 4, 5, 6]


def test_two_agents_cannot_share_a_folder(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path), StateDir(tmp_path)
    first.open()
    with pytest.raises(ConfigError, match="another agent uses"):
        second.open()
    first.close()
    second.open()
    second.close()


@pytest.mark.process
def test_a_disk_that_was_read_only_at_the_start_is_used_once_it_is_not(tmp_path: Path) -> None:
    """Its folder could not be made then: it was missed at every later try."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        disk.remount("ro")
        state = StateDir(disk.folder / "deep" / "state")
        state.open()
        assert not state.save(applied(Knowledge(), WANTED))
        assert "Read-only file system" in state.fault
        disk.remount("rw")
        assert state.save(applied(Knowledge(), WANTED))
        assert state.load() == applied(Knowledge(), WANTED)
        state.close()


@settings(max_examples=15)
@given(st.binary(max_size=100))
def test_a_damaged_file_counts_as_nothing_known(tmp_path_factory: pytest.TempPathFactory, garbage: bytes) -> None:
    folder = tmp_path_factory.mktemp("state")
    (folder / "desired.json").write_bytes(garbage)
    (folder / "birth").write_bytes(garbage)
    state = StateDir(folder)
    known = state.load()
    assert known == Knowledge()
    assert state.next_birth() >= 1


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert not StateDir(tmp_path).save(Knowledge())


def test_a_folder_that_cannot_be_used_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"fleet\.state_dir: cannot use"):
        StateDir(tmp_path / "file" / "below").open()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"device": "a/b"}, "no valid name"),
        ({"fleet": "+"}, "no valid name"),
        ({"telemetry_intervall_s": 3}, "did you mean `telemetry_interval_s`"),
        ({"telemetry_interval_s": 0}, "telemetry_interval_s"),
        ({"port": 70000}, "port"),
        ({"password_file": "x"}, "password_file needs a username"),
        ({"reconnect_min_s": 9, "reconnect_max_s": 3}, "below reconnect_min_s"),
        ({"tls": {"cert_file": "x"}}, "belong together"),
    ],
)
def test_a_wrong_fleet_table_is_named(table: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        decode(table, FleetConfig, source="test")
    assert says in error.value.message


def test_secrets_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="password_file"):
        FleetConfig(username="u", password_file=str(tmp_path / "none")).password()
    (tmp_path / "pw").write_text("secret\n")
    assert FleetConfig(username="u", password_file=str(tmp_path / "pw")).password() == "secret"
    with pytest.raises(ConfigError, match="TLS: cannot use"):
        FleetTls(ca_file=str(tmp_path / "none")).context()


def test_secrets_never_leave_the_device() -> None:
    config = {"gateway": {"api_keys": ["k"], "port": 1}, "upstream": {"api_key": "s", "url": "u"}, "password": ""}
    assert tellable(config) == {
        "gateway": {"api_keys": "***", "port": 1},
        "upstream": {"api_key": "***", "url": "u"},
        "password": "",
    }
