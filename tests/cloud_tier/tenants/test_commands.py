"""`overspill cloud keys` and `overspill cloud usage` as an operator uses them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cloud_tier.cli import app
from router.base.clock import MonotonicClock
from router.base.errors import ConfigError
from router.tenants.database import UsageDatabase
from router.tenants.keys_edit import NewKey, add_key
from router.tenants.ledger import Ledger
from router.tenants.tenancy import KeySources, Tenancy
from router.tenants.tenant import Role
from router.values.usage import Usage
from tests.support.gateway_fakes import gateway_deps, serving

RUN = CliRunner()


def run(*arguments: str, **environ: str) -> str:
    result = RUN.invoke(app, list(arguments), env=environ, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_key_is_made_listed_changed_and_revoked(tmp_path: Path) -> None:
    file = ("--file", str(tmp_path / "keys"))
    key = run("keys", "add", "acme", *file, "--device", "bench-1", "--tokens-per-minute", "1000").split()[0]
    caller = KeySources(path=tmp_path / "keys").directory().by_key(key.encode())
    assert caller is not None
    assert (caller.tenant.name, caller.device, caller.tenant.limits.tokens_per_minute) == ("acme", "bench-1", 1000)
    assert "monthly_tokens=5" in run("keys", "set", "acme", *file, "--monthly-tokens", "5", "--tokens-per-minute", "0")
    listed = json.loads(run("keys", "list", *file, "--json"))["tenants"]
    assert [tenant["name"] for tenant in listed] == ["acme"]
    assert listed[0]["limits"]["monthly_tokens"] == 5
    assert listed[0]["limits"]["tokens_per_minute"] is None
    shown = run("keys", "list", *file)
    assert key not in shown
    assert f"key {listed[0]['keys'][0]['id']} caller device=bench-1" in shown
    assert "revoked acme" in run("keys", "revoke", listed[0]["keys"][0]["id"], *file)
    assert KeySources(path=tmp_path / "keys").directory().by_key(key.encode()) is None


def test_the_file_is_the_one_of_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "cloud.toml"
    config.write_text(f'[auth]\nkeys_file = "{tmp_path}/keys"\n')
    run("keys", "add", "acme", "--config", str(config), "--role", "operator")
    assert "role=operator" in (tmp_path / "keys").read_text()
    with pytest.raises(ConfigError, match="no keys file"):
        run("keys", "list")
    with pytest.raises(ConfigError, match="there is no file"):
        run("keys", "list", "--file", str(tmp_path / "mistyped"))
    with pytest.raises(ConfigError, match="name a limit to change"):
        run("keys", "set", "acme", "--config", str(config))


def test_usage_is_a_table_of_the_database_or_of_a_running_tier(tmp_path: Path) -> None:
    operator = add_key(tmp_path / "keys", NewKey("ops", role=Role.OPERATOR), {})
    own = add_key(tmp_path / "keys", NewKey("acme"), {})
    database = UsageDatabase(str(tmp_path / "usage.db"))
    wall_s = 1_795_312_800.0
    ledger = Ledger(database, MonotonicClock(), lambda: wall_s)
    ledger.add("acme", "bench-1", "tiny", Usage(10, 5, 3))
    ledger.add("other", "", "tiny", Usage(1, 1))
    tenancy = Tenancy(KeySources(path=tmp_path / "keys").directory(), MonotonicClock(), ledger=ledger)
    database.open()
    head = "day,tenant,device,model,requests,prompt_tokens,cached_tokens,completion_tokens\n"
    acme, other = "2026-11-22,acme,bench-1,tiny,1,10,3,5\n", "2026-11-22,other,,tiny,1,1,0,1\n"
    with serving(gateway_deps(tenancy=tenancy)) as server:
        ask = ("usage", "--url", server.url)
        assert run(*ask, OVERSPILL_API_KEY=operator) == head + acme + other
        assert run(*ask, OVERSPILL_API_KEY=own) == head + acme
        assert run(*ask, "--since", "2026-11-23", OVERSPILL_API_KEY=own) == head
        with pytest.raises(ConfigError, match="`since`: `soon` is no day"):
            run(*ask, "--since", "soon", OVERSPILL_API_KEY=own)
    database.close()
    assert run("usage", "--database", str(tmp_path / "usage.db")) == head + acme + other
    with pytest.raises(ConfigError, match="--until: `soon` is no day"):
        run("usage", "--database", str(tmp_path / "usage.db"), "--until", "soon")
    assert json.loads(run("usage", "--database", str(tmp_path / "usage.db"), "--json"))[0]["counts"]["requests"] == 1


def test_a_database_that_is_none_of_usage_is_no_empty_table_and_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"usage\.db.*there is none"):
        run("usage", "--database", str(tmp_path / "usage.db"))
    assert not (tmp_path / "usage.db").exists()
    sqlite3.connect(tmp_path / "other.db").close()
    with pytest.raises(ConfigError, match="no usage"):
        run("usage", "--database", str(tmp_path / "other.db"))
    assert (tmp_path / "other.db").read_bytes() == b""
