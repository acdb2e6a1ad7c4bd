"""Traces of requests: when each arrived, how long its prompt and its answer were; slices of them, scaled to a load.

A trace is read from CSV or JSON lines, plain or gzipped (by the name's end), in any of three forms:

| form | columns or keys |
|---|---|
| plain CSV | `arrival_s`, `input_tokens`, `output_tokens`; optionally `session`, `shared_tokens` |
| Azure LLM 2023 as published | `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens` |
| Mooncake JSON lines | `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (prefix blocks) |
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

from router.base.errors import ConfigError

SHIPPED = {
    "azure-conv": "azure-llm-2023-conv.csv.gz",
    "azure-code": "azure-llm-2023-code.csv.gz",
    "mooncake": "mooncake-conversation.csv.gz",
}
"""Traces that come with Overspill, by name; source and licence are beside the files in `data/README.md`."""

MOONCAKE_BLOCK_TOKENS = 512
_DATA = Path(__file__).parent / "data"
_GOLDEN = (5**0.5 - 1) / 2  # offsets of successive seeds spread evenly: multiples of it, modulo 1
_MOST_ROWS = 2_000_000


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        arrival_s: seconds since the first row.
        input_tokens, output_tokens: lengths of prompt and answer, at least 1.
        session: requests of one session share the beginning of their prompts; None where nobody knows.
        shared_tokens: how much of the prompt an earlier request of the session had too.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    session: str | None = None
    shared_tokens: int = 0


def load_trace(name_or_path: str | Path) -> tuple[TraceRow, ...]:
    """Return the rows of a shipped trace (`SHIPPED`) or of a file, by arrival.

    Raises:
        ConfigError: no such trace, or a line is not what its form asks for; names the file and the line.
    """
    name = str(name_or_path)
    path = _DATA / SHIPPED[name] if name in SHIPPED else Path(name)
    if not path.is_file():
        raise ConfigError(f"trace: {name!r} is neither a file nor one of {', '.join(SHIPPED)}", param="trace")
    return read_trace(path)


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Read a trace file in any of the forms of this module; arrivals start at 0 and never go back.

    Raises:
        ConfigError: names the file, the line, the value and what is expected.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    form = (suffixes[-2:-1] if packed else suffixes[-1:]) or [""]
    readers: dict[str, Callable[[Path, TextIO], Iterator[TraceRow]]] = {
        ".csv": _csv_rows,
        ".jsonl": _mooncake_rows,
    }
    if form[0] not in readers:
        raise ConfigError(f"{path}: a trace is .csv, .csv.gz, .jsonl or .jsonl.gz", param="trace")
    rows: list[TraceRow] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as lines:
            for row in readers[form[0]](path, lines):
                rows.append(row)
                if len(rows) > _MOST_ROWS:
                    raise ConfigError(f"{path}: more than {_MOST_ROWS} rows; cut a slice of it", param="trace")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", param="trace") from error
    if not rows:
        raise ConfigError(f"{path}: holds no requests", param="trace")
    first_s = min(row.arrival_s for row in rows)
    return tuple(sorted((replace(row, arrival_s=row.arrival_s - first_s) for row in rows), key=lambda r: r.arrival_s))


def _csv_rows(path: Path, lines: TextIO) -> Iterator[TraceRow]:
    reader = csv.DictReader(lines)
    names = reader.fieldnames or []
    if {"arrival_s", "input_tokens", "output_tokens"} <= set(names):
        columns, when = ("arrival_s", "input_tokens", "output_tokens"), _seconds
    elif {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(names):
        columns, when = ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date_s
    else:
        raise ConfigError(
            f"{path}: line 1: columns {', '.join(names) or 'none'}; expected arrival_s, input_tokens, output_tokens, "
            "or TIMESTAMP, ContextTokens, GeneratedTokens",
            param="trace",
        )
    for record in reader:
        line = _Line(f"{path}: line {reader.line_num}", record)
        input_tokens = line.tokens(columns[1])
        shared_tokens = int(line.value("shared_tokens", _tokens)) if record.get("shared_tokens") else 0
        yield TraceRow(
            line.value(columns[0], when),
            input_tokens,
            line.tokens(columns[2]),
            record.get("session") or None,
            min(shared_tokens, input_tokens),
        )


@dataclass(frozen=True, slots=True)
class _Line:
    """One record of a file and where it stands, for the errors."""

    where: str
    record: Mapping[str, object]

    def value(self, name: str, parse: Callable[[object], float]) -> float:
        value = self.record.get(name)
        try:
            return parse(value)
        except ValueError as error:
            raise ConfigError(f"{self.where}: {name} = {value!r}: {error}", param="trace") from None

    def tokens(self, name: str) -> int:
        """Return a length. Traces hold a few answers of 0 tokens; nobody can serve less than 1."""
        return max(1, int(self.value(name, _tokens)))


def _seconds(value: object) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        raise ValueError("expected seconds") from None
    if not 0 <= seconds < 1e12:
        raise ValueError("expected seconds from 0 on")
    return seconds


def _date_s(value: object) -> float:
    # Seven digits of a second, as Azure writes them, are one more than fromisoformat of Python 3.10 reads.
    text = re.sub(r"(\.\d{6})\d+", r"\1", str(value))
    text = re.sub(r"\.(\d{1,5})(?=\D|$)", lambda match: "." + match[1].ljust(6, "0"), text)
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("expected a date and time such as 2023-11-16 18:15:46.6805900") from None
    return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()


def _tokens(value: object) -> int:
    try:
        tokens = int(str(value))
    except ValueError:
        raise ValueError("expected a whole number of tokens") from None
    if not 0 <= tokens <= 100_000_000:
        raise ValueError("expected a number of tokens from 0 to 100,000,000")
    return tokens


def _mooncake_rows(path: Path, lines: TextIO) -> Iterator[TraceRow]:
    records: list[tuple[_Line, tuple[int, ...]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: no JSON: {error}", param="trace") from None
        if not isinstance(record, dict) or not {"timestamp", "input_length", "output_length"} <= record.keys():
            raise ConfigError(f"{where}: expected keys timestamp, input_length, output_length", param="trace")
        blocks = record.get("hash_ids") or []
        if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
            raise ConfigError(f"{where}: hash_ids: expected a list of whole numbers", param="trace")
        records.append((_Line(where, record), tuple(blocks)))
        if len(records) > _MOST_ROWS:
            break
    sessions = _sessions([blocks for _, blocks in records])
    for (at, _), (session, shared_tokens) in zip(records, sessions, strict=True):
        input_tokens = at.tokens("input_length")
        arrival_s = at.value("timestamp", _seconds) / 1e3
        yield TraceRow(arrival_s, input_tokens, at.tokens("output_length"), session, min(shared_tokens, input_tokens))


def _sessions(prompts: Iterable[tuple[int, ...]]) -> Iterator[tuple[str | None, int]]:
    """Give each prompt a session, and how many tokens of it an earlier prompt of that session had.

    Blocks that all prompts begin with (a system prompt) say nothing. A session is who has the same first block after
    them: turns of one chat, or questions about one document.
    """
    prompts = list(prompts)
    common = 0
    while prompts and all(len(p) > common and p[common] == prompts[0][common] for p in prompts):
        common += 1
    seen: set[int] = set()
    for blocks in prompts:
        own = blocks[common:]
        shared = next((at for at, block in enumerate(own) if block not in seen), len(own))
        seen.update(own)
        yield (str(own[0]) if own else None), (shared + common) * MOONCAKE_BLOCK_TOKENS if shared else 0


def scale_inputs(rows: Sequence[TraceRow], mean_tokens: float | None, window_tokens: int) -> tuple[TraceRow, ...]:
    """Return `rows` with prompts scaled to a mean length, and capped so that prompt and answer fit a window.

    Args:
        mean_tokens: mean of the scaled prompts before the cap; None leaves them as they are.
        window_tokens: the largest window of the world. An answer that alone would fill it is cut to half of it.
    """
    factor = 1.0 if mean_tokens is None else mean_tokens / (sum(row.input_tokens for row in rows) / len(rows))
    scaled = []
    for row in rows:
        output_tokens = min(row.output_tokens, window_tokens // 2)
        input_tokens = max(1, min(round(row.input_tokens * factor), window_tokens - output_tokens))
        shared_tokens = min(round(row.shared_tokens * factor), input_tokens)
        scaled.append(replace(row, input_tokens=input_tokens, output_tokens=output_tokens, shared_tokens=shared_tokens))
    return tuple(scaled)


def slice_of(rows: Sequence[TraceRow], count: int, seed: int) -> tuple[TraceRow, ...]:
    """Return `count` successive rows from an offset that the seed sets; successive seeds lie far apart.

    Raises:
        ConfigError: the trace has fewer rows.
    """
    if not 0 < count <= len(rows):
        raise ConfigError(f"requests: {count} asked for, the trace has {len(rows)}", param="requests")
    start = int(((seed + 0.5) * _GOLDEN) % 1.0 * (len(rows) - count + 1))
    cut = rows[start : start + count]
    return tuple(replace(row, arrival_s=row.arrival_s - cut[0].arrival_s) for row in cut)


def at_rate(rows: Sequence[TraceRow], rate_rps: float) -> tuple[TraceRow, ...]:
    """Return `rows` with arrivals stretched to a mean rate; the shape of the bursts stays."""
    span_s = rows[-1].arrival_s - rows[0].arrival_s
    wanted_s = (len(rows) - 1) / rate_rps
    if span_s <= 0:  # one row, or all at once: nothing to stretch, so they come evenly
        return tuple(replace(row, arrival_s=at / rate_rps) for at, row in enumerate(rows))
    return tuple(replace(row, arrival_s=(row.arrival_s - rows[0].arrival_s) * wanted_s / span_s) for row in rows)
