"""Structured logs on stderr, written by a thread of their own: a full disk or a stuck pipe never stops a request.

No call raises, and no value ends the writer: a line that cannot be formatted is written as one that says so. What was
lost is counted: `lost`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import orjson
import structlog

_QUEUE_LINES = 10_000
_LAST_LINES_S = 1.0
_GATHER_S = 0.02
_GATHER_LINES = 256
_MAX_TEXT_CHARS = 16 * 1024
_MAX_LINE_CHARS = 256 * 1024
# Without local variables: they hold callers' prompts and keys.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
_JSON = structlog.processors.JSONRenderer()
_PLAIN = frozenset({str, int, float, bool, type(None)})
_LEVELS = ("debug", "info", "warning", "error", "critical")


_lost = {"dropped": 0, "unformatted": 0, "unwritten": 0}


def lost() -> dict[str, int]:
    """Return how many lines were dropped because the log is written too slowly, could not be formatted, or written."""
    return dict(_lost)


class _Event(NamedTuple):
    """What was logged through structlog, as it was said: the writing thread does the rest."""

    at_s: float
    level: str
    logger: str
    fields: dict[str, Any]


class _Lines:
    """What is still to be written. It drops lines while the writer is 10,000 behind, and says so afterwards."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[logging.LogRecord | _Event | None] = queue.SimpleQueue()
        self._dropped = 0

    def put(self, line: logging.LogRecord | _Event) -> None:
        if self.queue.qsize() >= _QUEUE_LINES:
            self._dropped += 1
            _lost["dropped"] += 1
            return
        self.queue.put(line)
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            told = f"dropped {dropped} log lines: the log is written too slowly"
            self.queue.put(_Event(time.time(), "warning", "logs", {"event": told}))


class _StandardHandler(logging.Handler):
    """Hands on the records of the standard library's loggers."""

    def __init__(self, lines: _Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record)


class _Source:
    """What structlog calls for each line that is to be written, by the name of its level."""

    def __init__(self, name: str, lines: _Lines) -> None:
        for level in _LEVELS:
            setattr(self, level, self._teller(level, name, lines))

    @staticmethod
    def _teller(level: str, name: str, lines: _Lines) -> Callable[..., None]:
        def tell(**fields: Any) -> None:
            if fields.get("exc_info") is True:  # looked up where it is: the writing thread has none
                fields["exc_info"] = sys.exc_info()
            lines.put(_Event(time.time(), level, name, fields))

        return tell


class _Writer(threading.Thread):
    """Formats and writes lines. Neither a stream nor a handler: a lock held in a stuck write would block the exit.

    Lines that are no warnings wait for others for a moment, and go out in one write: waking this thread for each of
    them would take the processor from whoever logs.
    """

    def __init__(
        self,
        lines: _Lines,
        render: Callable[[logging.LogRecord | _Event], str],
        unformatted: Callable[[dict[str, str]], str],
        fd: int,
    ) -> None:
        super().__init__(name="log-writer", daemon=True)
        self._queue = lines.queue
        self._render = render
        self._unformatted = unformatted
        self._fd = fd
        self._unwritten = 0  # and not told

    def run(self) -> None:
        """Write until the last line, whatever goes wrong with one of them or with this thread."""
        ended = False
        while not ended:
            found: list[logging.LogRecord | _Event | None] = []
            try:
                ended = self._write_some(found)
            except BaseException:  # noqa: BLE001 - a full disk, or no memory: there is nowhere to say so
                ended = None in found
                self._lose(len(found) - ended)
                if not found:  # its queue gives nothing: not at once again
                    time.sleep(_GATHER_S)
            del found  # while it waits for the next ones, it holds nothing of these

    def _write_some(self, found: list[logging.LogRecord | _Event | None]) -> bool:
        """Wait for lines, and write them: `found`, also where that fails. Returns whether they are the last ones."""
        found.append(self._queue.get())
        if not _is_urgent(found[0]):
            time.sleep(_GATHER_S)
        while found[-1] is not None and len(found) < _GATHER_LINES and not self._queue.empty():
            found.append(self._queue.get())
        self._write("".join(f"{self._format(line)}\n" for line in found if line is not None))
        ended = found[-1] is None
        found.clear()
        if self._unwritten:
            told = {"event": f"{self._unwritten} log lines before this one could not be written"}
            self._write(f"{self._format(_Event(time.time(), 'warning', 'logs', told))}\n")
            self._unwritten = 0
        return ended

    def _lose(self, lines: int) -> None:
        _lost["unwritten"] += lines
        self._unwritten += lines

    def _format(self, line: logging.LogRecord | _Event) -> str:
        try:
            text = self._render(line)
        except BaseException as error:  # noqa: BLE001 - whatever a value's `__repr__` raises
            _lost["unformatted"] += 1
            fields = {"error": type(error).__name__, "event": "this log line cannot be formatted"}
            if isinstance(line, _Event):
                return self._unformatted({**fields, "level": line.level, "logger": line.logger})
            where = f"{line.pathname}:{line.lineno}"
            return self._unformatted({**fields, "at": where, "level": _level_of(line), "logger": str(line.name)})
        if len(text) > _MAX_LINE_CHARS:
            _lost["unformatted"] += 1
            return self._unformatted(
                {"event": "a log line was too long", "beginning": text[:_MAX_TEXT_CHARS], "level": "error"}
            )
        return text

    def _write(self, text: str) -> None:
        rest = memoryview(text.encode(errors="backslashreplace"))
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def finish(self) -> None:
        """Write what is left, for a moment and no longer."""
        with contextlib.suppress(Exception):
            self._queue.put(None)
            self.join(_LAST_LINES_S)


def configure(level: str, log_format: Literal["auto", "console", "json"], fd: int = 2) -> None:
    """Send structlog and the standard library's loggers (uvicorn, asyncio) down one road, once a process."""
    terminal = os.isatty(fd)
    as_text = log_format == "console" or (log_format == "auto" and terminal)
    render = structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=structlog.dev.plain_traceback)
    steps: Sequence[structlog.typing.Processor] = [_clip, render] if as_text else [_clip, _TRACEBACKS, _as_json]

    def unformatted(fields: dict[str, str]) -> str:
        return " ".join(f"{name}={value!r}" for name, value in fields.items()) if as_text else json.dumps(fields)

    def rendered(line: logging.LogRecord | _Event) -> str:
        event: Any = _fields_of(line)
        for step in steps:
            event = step(None, event.get("level", "") if isinstance(event, dict) else "", event)
        return str(event)

    lines = _Lines()
    writer = _Writer(lines, rendered, unformatted, fd)
    writer.start()
    atexit.register(writer.finish)
    root = logging.getLogger()
    root.handlers = [_StandardHandler(lines)]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are about callers, one a bad request
    for name in ("httpx", "httpcore", "asyncio"):  # at `info`, a line for every poll of an upstream
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[_as_it_was_said],
        logger_factory=lambda *name: _Source(name[0] if name else "root", lines),
        wrapper_class=structlog.make_filtering_bound_logger(root.level),
        cache_logger_on_first_use=True,
    )


@contextlib.contextmanager
def at_least(level: int) -> Iterator[None]:
    """Log nothing below a level for as long: where a whole tier is simulated, its refusals and overload are no news."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    try:
        yield
    finally:
        structlog.configure(**before)


def _is_urgent(line: logging.LogRecord | _Event | None) -> bool:
    """Whether a line says that something is wrong, or is the last one."""
    return line is None or (line.level not in {"debug", "info"} if isinstance(line, _Event) else line.levelno > 20)


def _fields_of(line: logging.LogRecord | _Event) -> dict[str, Any]:
    """Return a line as structlog's renderers take it."""
    if isinstance(line, _Event):
        at_s, level, logger, fields = line
    else:
        at_s, level, logger = line.created, _level_of(line), line.name
        fields = {"event": line.getMessage()}
        if line.exc_info:
            fields["exc_info"] = line.exc_info
    second, micros = divmod(round(at_s * 1e6), 1_000_000)
    return {**fields, "level": level, "logger": logger, "timestamp": f"{_utc(second)}.{micros:06d}Z"}


@lru_cache(maxsize=4)
def _utc(second: int) -> str:
    """Return a second as a date, for all lines of it."""
    return datetime.fromtimestamp(second, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def _level_of(record: logging.LogRecord) -> str:
    return str(record.levelname).lower()


def _as_it_was_said(
    logger: structlog.typing.WrappedLogger,  # noqa: ARG001 - structlog's signature
    method: str,  # noqa: ARG001
    event: structlog.typing.EventDict,
) -> tuple[tuple[()], structlog.typing.EventDict]:
    """Hand the fields to the logger as they are."""
    return (), event


def _as_json(logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict) -> str:
    """Render a line of plain texts and numbers in a few microseconds; whatever else is in one, as structlog does.

    That time is taken from the event loop. A line looks as structlog's does, blank for blank: people search in them.
    Other letters are escaped: some would change what a terminal shows.
    """
    if _PLAIN.issuperset(map(type, event.values())):
        with contextlib.suppress(TypeError, ValueError):
            line = b", ".join([_named(name) + orjson.dumps(value) for name, value in event.items()])
            if line.isascii() and b"\x7f" not in line:
                return f"{{{line.decode()}}}"
    return str(_JSON(logger, method, event))


@lru_cache(maxsize=256)
def _named(field: str) -> bytes:
    """Return the name of a field as it stands before its value: the same few stand in every line."""
    return orjson.dumps(field) + b": "


def _clip(
    logger: structlog.typing.WrappedLogger,  # noqa: ARG001 - structlog's signature
    method: str,  # noqa: ARG001
    event: structlog.typing.EventDict,
) -> structlog.typing.EventDict:
    """Shorten long texts before they are copied into a line."""
    for name, value in event.items():
        if isinstance(value, (str, bytes)) and len(value) > _MAX_TEXT_CHARS:
            event[name] = f"{value[:_MAX_TEXT_CHARS]!s}… ({len(value)} in all)"
    return event
