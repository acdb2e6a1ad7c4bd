"""Logging changes the whole process, so each test has one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import REPOSITORY

PREAMBLE = """
import logging, structlog
from router.base import logs
logs.configure("info", "{format}")
log = structlog.get_logger("room")
"""


def _run(code: str, log_format: str = "json", stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE.format(format=log_format) + code],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=30,
        check=False,
    )


def test_every_logger_becomes_a_json_line() -> None:
    done = _run(
        "log.info('engine ready', load_s=1.5, odd='\\ud800')\n"
        "log.debug('hidden')\n"
        "logging.getLogger('asyncio').error('plain %s', 'text')\n"
        "logging.getLogger('asyncio').error('two %s %s', 'text')\n"
        "logging.getLogger('uvicorn.error').warning('Invalid HTTP request received.')\n"
        "logging.getLogger('httpx').info('HTTP Request: GET /health/ready')\n"
    )
    assert done.returncode == 0
    *lines, broken = done.stderr.splitlines()
    assert [(e["event"], e["level"], e["logger"]) for e in map(json.loads, lines)] == [
        ("engine ready", "info", "room"),
        ("plain text", "error", "asyncio"),
    ]
    assert json.loads(lines[0])["load_s"] == 1.5
    assert "cannot be formatted" in broken


def test_a_traceback_shows_no_local_variable() -> None:
    code = (
        "def serve(prompt):\n    1 / 0\n"
        "try:\n    serve('my' + 'secret')\nexcept ZeroDivisionError:\n    log.exception('x')\n"
    )
    for log_format in ("json", "console"):
        done = _run(code, log_format)
        assert "ZeroDivisionError" in done.stderr
        assert "serve" in done.stderr
        assert "mysecret" not in done.stderr


def test_a_full_disk_stops_nothing() -> None:
    with Path("/dev/full").open("wb") as full:
        done = _run("for n in range(100): log.info('line', n=n)\nprint('served')", stderr=full.fileno())
    assert (done.returncode, done.stdout) == (0, "served\n")


def test_a_pipe_that_nobody_reads_stops_neither_the_work_nor_the_exit() -> None:
    reader, writer = os.pipe()
    try:
        done = _run("for n in range(30_000): log.info('line', n=n)\nprint('served')", stderr=writer)
    finally:
        os.close(reader)
        os.close(writer)
    assert (done.returncode, done.stdout) == (0, "served\n")
