"""A batch whose tier is killed (SIGKILL) at counted points of its life: each line is answered exactly once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.killed_jobs import LINES
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.process

_POINTS = 160  # of a life that nobody ends


@pytest.fixture(scope="module")
def lives() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.killed_jobs"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield process
        process.stdin.close()


def _lived(process: subprocess.Popen[str], points: list[int]) -> dict[str, Any]:
    process.stdin.write(f"{json.dumps(points)}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@given(points=st.lists(st.integers(1, _POINTS), min_size=1, max_size=3))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tier_that_is_killed_anywhere_answers_each_line_once(lives: subprocess.Popen[str], points: list[int]) -> None:
    told = _lived(lives, points)
    assert told["ended"] == 0
    assert told["batches"] == [["completed", LINES, LINES - LINES // 4, LINES // 4]]
    numbers = range(1, LINES + 1)
    for kind, expected in (("output", [n for n in numbers if n % 4]), ("error", [n for n in numbers if n % 4 == 0])):
        answers = [json.loads(line) for line in told[kind][0].splitlines()]
        assert [answer["custom_id"] for answer in answers] == [f"id-{n}" for n in expected]
        assert [answer["response"]["body"]["n"] for answer in answers] == expected
    assert told["events"] == ["batch.completed"]
    assert told["lines_left"] == 0
    assert told["on_disk"] == told["files"]
    asked = Counter(json.loads(body)["n"] for body in told["asked"])
    assert set(asked) == set(numbers)
    assert max(asked.values()) <= 1 + sum(told["killed"])
