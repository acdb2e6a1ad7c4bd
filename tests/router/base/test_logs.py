"""To configure logging changes the whole process, so each test that does has one of its own."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from structlog.processors import JSONRenderer

from router.base import logs
from router.base.logs import _as_json, _Event, _fields_of
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.process

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


def test_less_is_logged_for_as_long_as_was_said_and_no_longer() -> None:
    log = structlog.get_logger("t")

    @logs.at_least(logging.ERROR)
    def crashes() -> None:
        log.warning("a")
        log.error("b")
        raise ValueError("over")

    with structlog.testing.capture_logs() as seen:
        with pytest.raises(ValueError, match="over"):
            crashes()
        log.warning("c")
    assert [line["event"] for line in seen] == ["b", "c"]


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


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20) | st.binary(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=6,
    )
)
def test_a_line_says_in_fewer_steps_what_structlog_makes_of_it(event: dict[str, Any]) -> None:
    line = _as_json(None, "info", dict(event))
    assert json.loads(line) == json.loads(str(JSONRenderer()(None, "info", dict(event))))
    assert line.isascii()
    assert all(" " <= char <= "~" for char in line)


def test_a_line_looks_as_structlog_writes_it() -> None:
    event = {"host": "127.0.0.1", "port": 8700, "share": 0.5, "models": ["a", "b"], "why": 'it "said" so', "of": None}
    for fields in (event, {name: value for name, value in event.items() if name != "models"}):
        assert _as_json(None, "info", dict(fields)) == str(JSONRenderer()(None, "info", dict(fields)))


@pytest.mark.parametrize(
    ("at_s", "told"),
    [
        (0.0, "1970-01-01T00:00:00.000000Z"),
        (1763856000.9999996, "2025-11-23T00:00:01.000000Z"),
        (1763856000.25, "2025-11-23T00:00:00.250000Z"),
    ],
)
def test_times_are_told_in_utc_to_the_microsecond(at_s: float, told: str) -> None:
    assert _fields_of(_Event(at_s, "info", "x", {}))["timestamp"] == told


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


HOSTILE = """
class Raises:
    def __init__(self, error): self.error = error
    def __repr__(self): raise self.error
    __str__ = __repr__
plain = logging.getLogger("plain")
deep = []
for _ in range(100_000): deep = [deep]
loop = {}
loop["loop"] = loop
hostile = [Raises(e) for e in (KeyError("k"), SystemExit(3), KeyboardInterrupt(), MemoryError(), RecursionError(),
                               UnicodeDecodeError("utf-8", b"x", 0, 1, "r"), GeneratorExit(), StopIteration())]
hostile += [deep, loop, b"\\xff\\xfe", "\\ud800", 10 ** 6000, float("nan")]
hostile += [{1: 2, (1, 2): 3, None: 4}, object(), Raises]
for value in hostile:
    log.info("structured", value=value)
    plain.info("%s", value)
    plain.info(value)
    plain.warning("%(missing)s", {"k": value})
    plain.warning("%d %d", value)
    plain.error("x", exc_info=("a", "b", "c"))
    log.error("x", exc_info="no error")
log.info("long", value="x" * 30_000_000, raw=b"y" * 1_000_000)
log.info("wide", value=list(range(1_000_000)))
log.info("the last word")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_whatever_is_logged_nothing_raises_and_the_writer_lives(log_format: str) -> None:
    done = _run(HOSTILE + "logs_lost = logs.lost()\nprint('served')\n", log_format)
    assert (done.returncode, done.stdout) == (0, "served\n")
    lines = done.stderr.splitlines()
    assert "the last word" in lines[-1]
    assert "KeyError" in done.stderr
    assert max(map(len, lines)) < 300_000
    if log_format == "json":
        events = [json.loads(line)["event"] for line in lines]
        assert events.count("this log line cannot be formatted") >= 8


def test_what_is_lost_is_counted() -> None:
    done = _run(
        "class Bad:\n    def __repr__(self): raise KeyError('k')\n"
        "for _ in range(3): log.info('x', value=Bad())\n"
        "import time\n"
        "until = time.monotonic() + 10\n"
        "while logs.lost()['unformatted'] < 3 and time.monotonic() < until: time.sleep(0.01)\n"
        "print(logs.lost())"
    )
    assert done.stdout == "{'dropped': 0, 'unformatted': 3, 'unwritten': 0}\n"


def test_what_goes_wrong_in_the_writing_thread_costs_the_lines_at_hand_and_is_told() -> None:
    done = _run(
        "import time, types\n"
        "def fails(seconds):\n    logs.time.sleep = time.sleep\n    raise MemoryError\n"
        "logs.time = types.SimpleNamespace(time=time.time, sleep=fails)\n"
        "log.info('lost')\n"
        "until = time.monotonic() + 60\n"
        "while not logs.lost()['unwritten'] and time.monotonic() < until: time.sleep(0.01)\n"
        "log.info('kept')\n"
        "print(logs.lost())"
    )
    assert done.stdout == "{'dropped': 0, 'unformatted': 0, 'unwritten': 1}\n"
    events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert events == ["kept", "1 log lines before this one could not be written"]


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
