"""Structured logs on stderr, written by a thread of their own: a full disk or a stuck pipe never stops a request.

No call raises, and no value ends the writer: a line that cannot be formatted is written as one that says so. What was
lost is counted: `lost`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import logging.handlers
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Literal

import structlog

_QUEUE_LINES = 10_000
_LAST_LINES_S = 1.0
_MAX_TEXT_CHARS = 16 * 1024
_MAX_LINE_CHARS = 256 * 1024
# Without local variables: they hold callers' prompts and keys.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


_lost = {"dropped": 0, "unformatted": 0, "unwritten": 0}


def lost() -> dict[str, int]:
    """Return how many lines were dropped because the log is written too slowly, could not be formatted, or written."""
    return dict(_lost)


class _DroppingHandler(logging.handlers.QueueHandler):
    """Hands records to the writing thread; drops them while it is 10,000 lines behind, and says so afterwards."""

    def __init__(self, lines: queue.Queue[logging.LogRecord | None]) -> None:
        super().__init__(lines)
        self._dropped = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's name
        """Count it: logging itself would write a traceback into a stream that may be stuck."""
        _lost["dropped"] += 1

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Keep structlog's event dictionary as it is: the writing thread renders it."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            _lost["dropped"] += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            logging.getLogger("logs").warning("dropped %d log lines: the log is written too slowly", dropped)


class _Writer(threading.Thread):
    """Formats and writes records. Neither a stream nor a handler: a lock held in a stuck write would block the exit."""

    def __init__(
        self,
        lines: queue.Queue[logging.LogRecord | None],
        formatter: logging.Formatter,
        unformatted: Callable[[dict[str, str]], str],
        fd: int,
    ) -> None:
        super().__init__(name="log-writer", daemon=True)
        self._lines = lines
        self._formatter = formatter
        self._unformatted = unformatted
        self._fd = fd

    def run(self) -> None:
        while (record := self._lines.get()) is not None:
            try:
                self._write(self._format(record))
            except BaseException:  # noqa: BLE001 - a full disk, or no memory: there is nowhere to say so
                _lost["unwritten"] += 1
            del record  # while it waits for the next one, it holds nothing of this one

    def _format(self, record: logging.LogRecord) -> str:
        try:
            line = self._formatter.format(record)
        except BaseException as error:  # noqa: BLE001 - whatever a value's `__repr__` raises
            _lost["unformatted"] += 1
            where = f"{record.pathname}:{record.lineno}"
            fields = {"error": type(error).__name__, "at": where, "event": "this log line cannot be formatted"}
            return self._unformatted({**fields, "level": str(record.levelname).lower(), "logger": str(record.name)})
        if len(line) > _MAX_LINE_CHARS:
            _lost["unformatted"] += 1
            return self._unformatted(
                {"event": "a log line was too long", "beginning": line[:_MAX_TEXT_CHARS], "level": "error"}
            )
        return line

    def _write(self, line: str) -> None:
        rest = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def finish(self) -> None:
        """Write what is left, for a moment and no longer."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_LAST_LINES_S)
            self.join(_LAST_LINES_S)


def configure(level: str, log_format: Literal["auto", "console", "json"], fd: int = 2) -> None:
    """Send structlog and the standard library's loggers (uvicorn, asyncio) down one road, once a process."""
    terminal = os.isatty(fd)
    as_text = log_format == "console" or (log_format == "auto" and terminal)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        _resolve_exception,
    ]
    renderers: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=structlog.dev.plain_traceback)]
        if as_text
        else [_TRACEBACKS, structlog.processors.JSONRenderer()]
    )

    def unformatted(fields: dict[str, str]) -> str:
        return " ".join(f"{name}={value!r}" for name, value in fields.items()) if as_text else json.dumps(fields)

    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _clip, *renderers],
    )
    lines: queue.Queue[logging.LogRecord | None] = queue.Queue(_QUEUE_LINES)
    writer = _Writer(lines, formatter, unformatted, fd)
    writer.start()
    atexit.register(writer.finish)
    root = logging.getLogger()
    root.handlers = [_DroppingHandler(lines)]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are about callers, one a bad request
    for name in ("httpx", "httpcore", "asyncio"):  # at `info`, a line for every poll of an upstream
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


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


def _resolve_exception(
    logger: structlog.typing.WrappedLogger,  # noqa: ARG001 - structlog's signature
    method: str,  # noqa: ARG001
    event: structlog.typing.EventDict,
) -> structlog.typing.EventDict:
    """Look the current exception up where it is: the writing thread has none."""
    if event.get("exc_info") is True:
        event["exc_info"] = sys.exc_info()
    return event
