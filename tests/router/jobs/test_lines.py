"""What an input file may hold, and what reading it costs."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from router.jobs import lines
from router.jobs.lines import LineRules, body_of, check

URL = "/v1/completions"
RULES = LineRules(URL, max_lines=5, max_line_bytes=200)


def _line(number: int, **more) -> bytes:
    return json.dumps(
        {"custom_id": f"id-{number}", "method": "POST", "url": URL, "body": {"model": "m"}, **more}
    ).encode()


def _codes(path: Path) -> list[tuple[str, int | None]]:
    return [(fault.code, fault.line) for fault in check(path, "b", RULES).faults]


def test_blank_lines_and_ends_of_lines_are_nobody_s_concern(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"\n" + _line(1) + b"\r\n\n  \n" + _line(2))
    found = check(path, "b", RULES)
    assert [(line.number, line.custom_id) for line in found.lines] == [(2, "id-1"), (5, "id-2")]
    assert [json.loads(body_of(path, line)) for line in found.lines] == [{"model": "m"}] * 2


def test_a_byte_order_mark_at_the_beginning_of_a_file_is_no_part_of_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(codecs.BOM_UTF8 + _line(1) + b"\n" + _line(2))
    found = check(path, "b", RULES)
    assert [(line.number, line.custom_id) for line in found.lines] == [(1, "id-1"), (2, "id-2")]
    assert [json.loads(body_of(path, line)) for line in found.lines] == [{"model": "m"}] * 2
    path.write_bytes(codecs.BOM_UTF8)
    assert _codes(path) == [("empty_file", None)]


@pytest.mark.parametrize("blank", [b"\n", b" \n", b"\r\n"])
def test_a_file_of_blank_lines_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: bytes
) -> None:
    monkeypatch.setattr(lines, "_MOST_BLANK", 20)
    path = tmp_path / "lines"
    path.write_bytes(_line(1) + b"\n" + blank * 20 + _line(2))
    assert _codes(path) == []
    path.write_bytes(_line(1) + b"\n" + blank * 1000)
    assert _codes(path) == [("too_many_tasks", None)]
    path.write_bytes(blank * 10)
    assert _codes(path) == [("empty_file", None)]


def test_a_line_without_an_end_is_one_fault(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(_line(1) + b"\n" + b'{"custom_id": "' + b"a" * 10_000 + b"\n" + _line(2))
    assert _codes(path) == [("line_too_long", 2)]


def test_more_lines_than_a_batch_may_have_are_one_fault(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"\n".join(_line(number) for number in range(5)))
    assert _codes(path) == []
    path.write_bytes(b"\n".join(_line(number) for number in range(6)))
    assert _codes(path) == [("too_many_tasks", None)]
