"""The lines of an input file: read without holding the file, checked, and told of where one is wrong."""

from __future__ import annotations

import hashlib
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from router.base.json_input import UNREADABLE
from router.jobs.records import Line

_MOST_FAULTS = 1_000
_MOST_BLANK = 10_000  # a file of nothing else would take a thread for an hour
_MOST_ID_CHARS = 512
_PAUSE_EVERY = 64  # lines; a thread that decodes without a pause keeps the event loop from its turn
_PAUSE_S = 0.001
_MISSING = "missing_required_parameter"
_STREAMED = "`stream`: answers of a batch are written whole: leave it out"

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why a line is none.

    Attributes:
        code: in the words of the OpenAI API where it has one.
        line: its number, from 1; None where it is about the whole file.
        param: the field at fault.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None
    custom_id: str | None = None


@dataclass(slots=True)
class Checked:
    """What a file holds.

    Attributes:
        faults: the first thousand; a file that has any is no batch.
    """

    lines: list[Line] = field(default_factory=list)
    faults: list[LineFault] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LineRules:
    """What every line has to keep.

    Attributes:
        endpoint: the one path that all of them ask.
        max_lines: of one file; max_line_bytes: of one line.
    """

    endpoint: str
    max_lines: int
    max_line_bytes: int


def check(path: Path, batch_id: str, rules: LineRules) -> Checked:
    """Read a whole file. Blocks; blank lines are skipped.

    Raises:
        OSError: it cannot be read.
    """
    found = Checked()
    seen: set[bytes] = set()
    for number, (at, raw) in enumerate(_raw_lines(path, rules.max_line_bytes), 1):
        if number % _PAUSE_EVERY == 0:
            time.sleep(_PAUSE_S)
        if not raw.strip():
            if number <= _MOST_BLANK + rules.max_lines:
                continue
            found.faults.append(LineFault("too_many_tasks", f"the file has more than {_MOST_BLANK} blank lines"))
            break
        line = _check_line(raw, number, rules, seen)
        if isinstance(line, LineFault):
            found.faults.append(line)
        else:
            found.lines.append(Line(batch_id, number, line, at, len(raw)))
        if len(found.faults) >= _MOST_FAULTS:
            break
        if len(found.lines) > rules.max_lines:
            message = f"the file has more than {rules.max_lines} lines, the most of one batch here: split it"
            found.faults.append(LineFault("too_many_tasks", message))
            break
    if not found.lines and not found.faults:
        found.faults.append(LineFault("empty_file", "the file has no lines"))
    return found


def _raw_lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield where each line begins, and the line; one that is too long is cut behind the bound.

    The byte order mark that some editors begin a file with is no part of a line.
    """
    with path.open("rb") as file:
        at = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0
        file.seek(at)
        while raw := file.readline(max_line_bytes + 1):
            begin, at = at, at + len(raw)
            piece = raw
            while piece and not piece.endswith(b"\n") and len(raw) > max_line_bytes:
                piece = file.readline(max_line_bytes)  # the rest of a line that is refused anyway
                at += len(piece)
            yield begin, raw


def _check_line(raw: bytes, number: int, rules: LineRules, seen: set[bytes]) -> str | LineFault:
    """Return the line's `custom_id`, or what is wrong with it."""
    if len(raw) > rules.max_line_bytes:
        return LineFault("line_too_long", f"the line is longer than {rules.max_line_bytes} bytes", number)
    try:
        fields = _fields.decode(raw)
    except UNREADABLE as error:
        return LineFault("invalid_json_line", f"the line is no JSON object: {error}"[:300], number)
    custom_id = _string(fields, "custom_id")
    if custom_id is None or not 0 < len(custom_id) <= _MOST_ID_CHARS:
        message = f"`custom_id` must be a text of 1 to {_MOST_ID_CHARS} characters"
        return LineFault(_missing_or("invalid_custom_id", fields, "custom_id"), message, number, "custom_id")
    fault = _fault_of(fields, rules.endpoint)
    if fault is not None:
        return LineFault(fault[0], fault[2], number, fault[1], custom_id)
    digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
    if digest in seen:
        message = f"`custom_id`: `{custom_id[:100]}` is that of an earlier line too: give each line its own"
        return LineFault("duplicate_custom_id", message, number, "custom_id", custom_id)
    seen.add(digest)
    return custom_id


def _fault_of(fields: dict[str, msgspec.Raw], endpoint: str) -> tuple[str, str, str] | None:
    """Return code, field and message of what is wrong beside the id."""
    method, url = _string(fields, "method"), _string(fields, "url")
    if method != "POST":
        return _missing_or("invalid_method", fields, "method"), "method", f"`method`: {_shown(method)}: expected `POST`"
    if url != endpoint:
        message = f"`url`: {_shown(url)}: this batch asks `{endpoint}`, in every line"
        return _missing_or("url_mismatch", fields, "url"), "url", message
    if "body" not in fields:
        return _MISSING, "body", "`body` is required"
    return _fault_of_body(bytes(fields["body"]))


def _fault_of_body(raw: bytes) -> tuple[str, str, str] | None:
    try:
        body = _fields.decode(raw)
    except UNREADABLE:
        return "invalid_body", "body", "`body`: expected a JSON object"
    if not _string(body, "model"):
        return _missing_or("invalid_model", body, "model"), "body.model", "`body.model`: expected the name of a model"
    if bytes(body.get("stream", b"null")).strip() == b"true":
        return "invalid_body", "body.stream", _STREAMED
    return None


def _string(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    try:
        return _text.decode(fields[name])
    except (KeyError, *UNREADABLE):
        return None


def _missing_or(code: str, fields: dict[str, msgspec.Raw], name: str) -> str:
    return code if name in fields else _MISSING


def _shown(text: str | None) -> str:
    return "not a text" if text is None else f"`{text[:100]}`"


def body_of(path: Path, line: Line) -> bytes:
    """Read the body of one request, as it was sent.

    Raises:
        OSError: the file is gone, or is not what was checked.
    """
    with path.open("rb") as file:
        file.seek(line.at)
        raw = file.read(line.size)
    try:
        return bytes(_fields.decode(raw)["body"])
    except (*UNREADABLE, KeyError) as error:
        raise OSError(f"line {line.number} of {path.name} has changed on the disk") from error


def faults_as_json(faults: list[LineFault], most: int) -> list[dict[str, Any]]:
    """Return the first faults as a batch tells of them."""
    return [{"code": f.code, "message": f.message, "line": f.line, "param": f.param} for f in faults[:most]]
