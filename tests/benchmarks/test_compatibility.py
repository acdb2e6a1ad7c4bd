"""The table of clients and servers: what a script reports, what counts as lost, and that the page is of its results."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compatibility.__main__ import PAGE, RESULTS
from benchmarks.compatibility.client_run import ask, report
from benchmarks.compatibility.clients.checking import Pieces, Server, refused
from benchmarks.compatibility.environments import CLIENTS as SCRIPTS
from benchmarks.compatibility.environments import Command, MissingError, Npm, Programs, Venv
from benchmarks.compatibility.outcomes import Check, Run, load, merged, save
from benchmarks.compatibility.page import Page, cells, reasons, regressions, stale
from benchmarks.compatibility.registry import CLIENTS, client
from benchmarks.compatibility.servers import KINDS, live_folder, live_python

SCRIPT = """
from checking import Checks, NotRunError, Server
checks = Checks((), {"toy": "1"})

@checks.that("passes")
def passes(server: Server) -> None:
    assert server.openai_url == "http://127.0.0.1:1/v1"

@checks.that("fails")
def fails(server: Server) -> None:
    print("noise of a library")
    found = "nothing"
    assert found == "something"

@checks.that("is not asked")
async def is_not_asked(server: Server) -> None:
    server.wants_embeddings()

@checks.that("ends it all")
def ends_it_all(server: Server) -> None:
    import os
    ENDING

@checks.that("comes after")
def comes_after(server: Server) -> None:
    pass

checks.run()
"""


def server(folder: Path) -> Server:
    nowhere = "http://127.0.0.1:1"
    return Server("toy", nowhere, "key", "m", nowhere, "", "", "", "", "", "m", "m", folder, 2048, 0, folder)


def toy(folder: Path, ending: str) -> Command:
    path = folder / "toy.py"
    path.write_text(SCRIPT.replace("ENDING", ending), encoding="utf-8")
    return Command((sys.executable, str(path)), {"PYTHONPATH": str(SCRIPTS)})


def run_of(client_name: str, server_name: str, **outcomes: str) -> Run:
    checks = [
        Check(name.replace("_", " "), outcome, "so it said" if outcome == "fail" else "")  # type: ignore[arg-type]
        for name, outcome in outcomes.items()
    ]
    return Run(client_name, server_name, "2026-11-22", "abc", {"openai": "3"}, "one", checks)


@pytest.mark.process
async def test_what_a_script_reports_is_told_and_what_it_never_reported_has_failed(tmp_path: Path) -> None:
    told = await ask(toy(tmp_path, "os._exit(3)"), server(tmp_path), tmp_path / "log", 60)
    assert told.versions == {"toy": "1"}
    assert [(check.check, check.outcome) for check in told.checks] == [
        ("passes", "pass"),
        ("fails", "fail"),
        ("is not asked", "not run"),
        ("ends it all", "fail"),
        ("comes after", "fail"),
    ]
    reasons_told = {check.check: check.reason for check in told.checks}
    assert reasons_told["fails"] == 'AssertionError: assert found == "something"'
    assert reasons_told["is not asked"] == "this server has no embedding model"
    assert "ended with 3" in reasons_told["comes after"]


@pytest.mark.process
async def test_a_client_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    ending = f"os.system('sleep 60; touch {tmp_path}/late')"
    began_s = time.monotonic()
    told = await ask(toy(tmp_path, ending), server(tmp_path), tmp_path / "log", 2)
    assert time.monotonic() - began_s < 30
    assert "no end after 2 s" in {check.check: check.reason for check in told.checks}["ends it all"]
    assert not (tmp_path / "late").exists()


@pytest.mark.process
async def test_a_part_of_the_checks_is_a_part_and_no_failure(tmp_path: Path) -> None:
    told = await ask(toy(tmp_path, "os._exit(3)"), server(tmp_path), tmp_path / "log", 60, ("passes",))
    assert [(check.check, check.outcome) for check in told.checks] == [("passes", "pass")]


def test_a_client_that_does_not_start_fails_with_what_it_said() -> None:
    told = report([b"Traceback\n"], "the script ended with 1: no module named openai")
    assert told.checks == [Check("the client starts", "fail", "the script ended with 1: no module named openai")]


def test_a_stream_in_one_piece_is_no_stream() -> None:
    pieces = Pieces()
    for text in ("one", None, "", "two"):
        pieces.add(text)
    assert pieces.text == "onetwo"
    with pytest.raises(AssertionError, match="a stream of 2 pieces"):
        pieces.came_over_time()
    slow = Pieces(["a", "b", "c", "d"], [0.0, 0.1, 0.2, 0.3])
    slow.came_over_time()
    at_once = Pieces(["a", "b", "c", "d"], [0.0, 0.001, 0.002, 0.003])
    with pytest.raises(AssertionError, match="4 pieces within 3 ms"):
        at_once.came_over_time()


def test_a_call_that_is_served_is_not_refused() -> None:
    with pytest.raises(AssertionError, match="served, where KeyError was due"):
        refused(KeyError, lambda: "an answer")
    assert isinstance(refused(KeyError, lambda: {}["x"]), KeyError)


def test_what_a_peer_passes_and_we_fail_is_lost_unless_there_is_a_reason() -> None:
    runs = [
        run_of("openai-python", "edge", chat="pass", echo="fail", tools="fail", n="fail"),
        run_of("openai-python", "vllm", chat="pass", echo="pass", tools="fail", n="pass"),
    ]
    why = {("openai-python", "n", "edge"): "one choice", ("openai-python", "chat", "edge"): "was so once"}
    found = cells(runs, why)
    assert [(cell.server, cell.check.check) for cell in regressions(found, KINDS)] == [("edge", "echo")]
    assert stale(found, why) == ["openai-python · chat · edge"]


def test_a_part_that_is_run_again_replaces_its_rows_alone(tmp_path: Path) -> None:
    before = [
        run_of("langchain", "edge", chat="fail"),
        run_of("openai-python", "cloud", chat="pass"),
        run_of("openai-python", "edge", chat="fail"),
        run_of("gone", "edge", chat="pass"),
    ]
    now = [run_of("openai-python", "edge", chat="pass")]
    runs = merged(before, now, ["openai-python", "langchain"], ["edge", "cloud"])
    assert [(run.client, run.server, run.checks[0].outcome) for run in runs] == [
        ("openai-python", "edge", "pass"),
        ("openai-python", "cloud", "pass"),
        ("langchain", "edge", "fail"),
    ]
    save(tmp_path / "results.json", runs, {"cpu": "one"})
    assert load(tmp_path / "results.json") == runs
    assert load(tmp_path / "none.json") == []


def test_the_page_tells_what_failed_once_and_escapes_what_tables_would_eat() -> None:
    lost = Check("a|b <c>", "fail", "TypeError: x | y")
    runs = [
        replace_checks(run_of("openai-python", "edge"), [lost, Check("chat", "not run", "no such thing")]),
        replace_checks(run_of("openai-python", "cloud"), [lost, Check("chat", "pass")]),
        replace_checks(run_of("openai-python", "vllm"), [Check("a|b <c>", "pass"), Check("chat", "pass")]),
    ]
    text = Page(runs, CLIENTS, KINDS).text()
    assert "| a\\|b &lt;c\\> | ✗ 1 | ✗ 1 | ✓ |" in text
    assert "| chat | – 2 | ✓ | ✓ |" in text
    assert "1. TypeError: x \\| y\n2. no such thing" in text
    assert "| openai (Python) | 0 / 1 | 1 / 2 | 2 / 2 |" in text
    assert text.rstrip().endswith("- cloud: openai-python: a\\|b &lt;c\\>")


def replace_checks(run: Run, checks: list[Check]) -> Run:
    return Run(run.client, run.server, run.measured, run.commit, run.versions, run.server_version, checks)


def test_the_page_is_of_the_results() -> None:
    """Whoever edits one of them runs `python -m benchmarks compatibility -- --page`."""
    assert PAGE.read_text(encoding="utf-8") == Page(load(RESULTS), CLIENTS, KINDS).text()


def test_the_reasons_name_clients_and_servers_that_there_are() -> None:
    for name, check, server_name in reasons():
        assert name in {one.name for one in CLIENTS}, name
        assert server_name in {kind.name for kind in KINDS if not kind.peer}, (check, server_name)


def test_every_client_has_its_script_and_exact_pins() -> None:
    assert len({one.name for one in CLIENTS}) == len(CLIENTS)
    for one in CLIENTS:
        assert (SCRIPTS / one.script).is_file(), one.script
        if isinstance(one.environment, Venv):
            assert all("==" in package for package in one.environment.packages), one.name
        if isinstance(one.environment, Npm):
            assert all("@" in package[1:] for package in one.environment.packages), one.name
    with pytest.raises(KeyError, match="openai-python, openai-node"):
        client("openia")


def test_what_is_not_there_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="chromium or google-chrome is not installed"):
        Programs((("chromium", "google-chrome"),)).prepare(tmp_path, "browser_page.py")
    with pytest.raises(MissingError, match="node is not installed"):
        Npm("node", ("openai@7",)).prepare(tmp_path, "openai_node.cjs")
    monkeypatch.delenv("OVERSPILL_LIVE_VLLM", raising=False)
    with pytest.raises(MissingError, match="OVERSPILL_LIVE_VLLM is not set"):
        live_python("OVERSPILL_LIVE_VLLM")
    monkeypatch.setenv("OVERSPILL_LIVE_VLLM", "/nowhere/python")
    with pytest.raises(MissingError, match="no such program"):
        live_python("OVERSPILL_LIVE_VLLM")
    monkeypatch.setenv("OVERSPILL_LIVE_VLLM_MODEL", str(tmp_path))
    with pytest.raises(MissingError, match=r"config\.json"):
        live_folder("OVERSPILL_LIVE_VLLM_MODEL")


@pytest.mark.process
def test_an_environment_is_made_again_when_its_pins_change(tmp_path: Path) -> None:
    venv = Venv("empty", ("pip",))  # which is there already
    command = venv.prepare(tmp_path, "curl_commands.py")
    assert Path(command.argv[0]).is_file()
    kept = tmp_path / "empty" / "kept"
    kept.touch()
    venv.prepare(tmp_path, "curl_commands.py")
    assert kept.exists()
    with pytest.raises(MissingError, match="could not be installed"):
        replace(venv, packages=("no such requirement!",)).prepare(tmp_path, "curl_commands.py")
    assert not kept.exists()


def test_a_server_travels_to_its_script_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = server(tmp_path)
    told = {**there.__dict__, "tokenizer": str(tmp_path), "folder": str(tmp_path)}
    monkeypatch.setenv("COMPATIBILITY_SERVER", json.dumps(told))
    assert Server.from_environment() == there
    assert there.ours
    assert not replace(there, name="vllm").ours
