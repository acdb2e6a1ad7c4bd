"""`overspill edge check` and the flags: what could not run is told before it runs."""

from __future__ import annotations

import http.server
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge_agent.cli import app
from edge_agent.config import EdgeConfig, load_config
from edge_agent.report import check_as_json, check_lines
from router.base.errors import ConfigError
from tests.support.paths import REPOSITORY
from tests.support.ports import refused_port
from tests.support.tiny_store import TinyWorld, build_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return build_world(tmp_path_factory.mktemp("world"))


def checked(config: EdgeConfig) -> str:
    return "\n".join(check_lines(config))


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_taken_port_is_an_error(world: TinyWorld) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*choose another --port"):
            checked(world.config(gateway={"port": port}))
    assert checked(world.config(gateway={"port": port})).endswith("\nok")


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_version_6_is_told_as_a_url_that_can_be_opened(world: TinyWorld, host: str) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert "gateway   http://[::1]:0, " in checked(world.config(gateway={"host": host}))


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, json.dumps({"data": [{"id": "big"}, {"id": "big-fp32"}]}), "reached, serves big, big-fp32"),
        (200, json.dumps({"data": []}), "reached, serves nothing yet"),
        (200, "<html>", "warning   the upstream's list of models cannot be read"),
        (200, "[1]", "warning   the upstream's list of models cannot be read"),
        (401, "{}", "warning   the upstream does not accept upstream.api_key"),
        (404, "{}", "warning   the upstream answers HTTP 404"),
    ],
)
def test_what_the_upstream_answers_is_told(world: TinyWorld, status: int, body: str, says: str) -> None:
    with answering(status, body.encode()) as url:
        lines = checked(world.config(upstream={"url": url}))
    assert says in lines
    assert lines.endswith("\nok")


def test_an_upstream_that_is_away_is_a_warning(world: TinyWorld) -> None:
    with refused_port() as port:
        lines = checked(world.config(upstream={"url": f"http://127.0.0.1:{port}"}))
    assert re.search(r"^warning   the upstream cannot be reached now \(ConnectError: ", lines, re.MULTILINE)
    assert lines.endswith("\nok")


def test_check_and_profile_as_json(world: TinyWorld) -> None:
    tree = check_as_json(world.config())
    assert tree["ok"] is True
    assert tree["warning"] == []
    assert any("tiny-int8" in line for line in tree["model"])
    assert tree["upstream"][0].startswith("none")
    with refused_port() as port:
        away = check_as_json(world.config(upstream={"url": f"http://127.0.0.1:{port}"}))
    assert len(away["warning"]) == 1
    done = CliRunner().invoke(app, ["profile", "--json"])
    told = json.loads(done.stdout)
    assert told["facts"]["cpu_count"] >= 1
    assert told["profile"]["name"] in told["reason"] + told["profile"]["name"]
    assert told["health"]["memory_total_bytes"] > 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--upstream", "localhost:8700"],
            "--upstream: upstream.url: `localhost:8700`: expected a URL such as https://",
        ),
        (["--upstream", "http://cloud:8700/v1"], "--upstream: upstream.url: `http://cloud:8700/v1` ends in /v1"),
        (["--port", "99999"], "--port: `gateway.port` = 99999"),
        (["--host", "0.0.0.0"], "gateway.host 0.0.0.0 can be reached from other machines"),  # noqa: S104
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_the_flag_at_fault_is_named(command: str, flags: list[str], says: str) -> None:
    result = CliRunner().invoke(app, [command, *flags])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message.startswith(says)


@pytest.mark.process
@pytest.mark.parametrize("part", ["edge", "cloud", "fleet", "models"])
def test_completion_is_the_business_of_the_whole_command(part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "overspill", part, "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert "--install-completion" not in done.stdout
    assert "Usage" in done.stdout


def test_an_upstream_key_that_no_header_can_carry_is_named_and_not_shown(world: TinyWorld) -> None:
    for key in ("schlüssel-0123456789", "key with blanks 0123", "key\nx-injected: 1 0123"):
        with pytest.raises(ConfigError) as refusal:
            checked(world.config(upstream={"url": "http://127.0.0.1:9", "api_key": key}))
        assert refusal.value.param == "upstream.api_key"
        assert key not in refusal.value.message


def test_the_files_of_the_fleet_are_tried(world: TinyWorld, tmp_path: Path) -> None:
    def fleet(**more: object) -> EdgeConfig:
        return world.config(fleet={"enabled": True, "device": "d", "state_dir": str(tmp_path / "state"), **more})

    assert "fleet     default/d" in checked(fleet())
    assert not (tmp_path / "state").exists(), "a check changes nothing"
    file = tmp_path / "file"
    file.write_bytes(b"")
    for more, param in (
        ({"username": "u", "password_file": str(tmp_path / "none")}, "fleet.password_file"),
        ({"tls": {"ca_file": str(file)}}, None),
        ({"state_dir": str(file / "below")}, "fleet.state_dir"),
    ):
        with pytest.raises(ConfigError) as refusal:
            checked(fleet(**more))
        assert param in {None, refusal.value.param}


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"jobs": {"dir": "{tmp}/file"}}, "jobs.dir: cannot write .*/file: .*no folder"),
        ({"jobs": {"dir": "{tmp}/jobs", "database": "nonsense"}}, "jobs.database: .*URL"),
        ({"jobs": {"dir": "{tmp}/jobs", "database": "nosuch://host/db"}}, "jobs.database: .*install its driver"),
        ({"jobs": {"dir": "{tmp}/jobs", "database": "sqlite:///{tmp}"}}, "jobs.database: cannot use .* is a folder"),
        ({"jobs": {"dir": "{tmp}/jobs", "database": "env:NO_SUCH_VARIABLE"}}, "jobs.database: .*NO_SUCH_VARIABLE"),
        ({"tenants": {"database": "{tmp}"}}, "tenants.database: cannot use .* is a folder"),
        ({"tenants": {"database": "{tmp}/no/usage.db"}}, "tenants.database: cannot use .*/no is no folder"),
        ({"tenants": {"database": "{tmp}/file"}}, "tenants.database: .*/file is a file, but no database"),
        ({"tenants": {"database": "nosuch://host/db"}}, "tenants.database: .*nosuch"),
        ({"tenants": {"database": "env:NO_SUCH_VARIABLE"}}, "tenants.database: .*NO_SUCH_VARIABLE"),
    ],
)
def test_stores_that_run_would_refuse_are_refused(
    world: TinyWorld, tmp_path: Path, tables: dict[str, dict[str, str]], says: str
) -> None:
    (tmp_path / "file").write_text("a letter")
    filled = {
        table: {key: value.replace("{tmp}", str(tmp_path)) for key, value in keys.items()}
        for table, keys in tables.items()
    }
    with pytest.raises(ConfigError, match=says):
        checked(world.config(**filled))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_stores_that_are_not_there_yet_are_good_and_not_made(world: TinyWorld, tmp_path: Path) -> None:
    stores = {"jobs": {"dir": str(tmp_path / "deep" / "jobs")}, "tenants": {"database": str(tmp_path / "usage.db")}}
    assert checked(world.config(**stores)).endswith("ok")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("gateway", "grpc", "says"),
    [(8600, {"port": 8600}, "grpc.port = 8600 is gateway.port too"), (65_535, {}, "none after gateway.port = 65535")],
)
def test_grpc_needs_a_port_of_its_own(tmp_path: Path, gateway: int, grpc: dict[str, int], says: str) -> None:
    config = tmp_path / "edge.toml"
    config.write_text(f"[grpc]\nenabled = true\n{''.join(f'port = {port}' for port in grpc.values())}\n")
    with pytest.raises(ConfigError, match=says):
        load_config(config, environ={"OVERSPILL_EDGE__GATEWAY__PORT": str(gateway)})


def test_the_key_of_a_path_that_is_of_the_wrong_kind_is_named(world: TinyWorld, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a letter")
    with pytest.raises(ConfigError, match=r"file is no folder; see models\.catalogue"):
        checked(world.config(models={"catalogue": str(file)}))
    with pytest.raises(ConfigError, match="keys_file: cannot read"):
        checked(world.config(gateway={"keys_file": str(tmp_path)}))
