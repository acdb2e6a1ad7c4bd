"""Structured logs on stderr, written by a thread of their own: a full disk or a stuck pipe never stops a request."""

from __future__ import annotations

import atexit
import contextlib
import logging
import logging.handlers
import os
import queue
import sys
import threading
from typing import Literal

import structlog

_QUEUE_LINES = 10_000
_LAST_LINES_S = 1.0
# Without local variables: they hold callers' prompts and keys.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


class _DroppingHandler(logging.handlers.QueueHandler):
    """Hands records to the writing thread; drops them while it is 10,000 lines behind, and says so afterwards."""

    def __init__(self, lines: queue.Queue[logging.LogRecord | None]) -> None:
        super().__init__(lines)
        self._dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Keep structlog's event dictionary as it is: the writing thread renders it."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            logging.getLogger("logs").warning("dropped %d log lines: the log is written too slowly", dropped)


class _Writer(threading.Thread):
    """Formats and writes records. Neither a stream nor a handler: a lock held in a stuck write would block the exit."""

    def __init__(self, lines: queue.Queue[logging.LogRecord | None], formatter: logging.Formatter, fd: int) -> None:
        super().__init__(name="log-writer", daemon=True)
        self._lines = lines
        self._formatter = formatter
        self._fd = fd

    def run(self) -> None:
        while (record := self._lines.get()) is not None:
            try:
                line = self._formatter.format(record)
            except (TypeError, ValueError) as error:  # arguments that do not fit the message
                line = f"{record.pathname}:{record.lineno}: this log line cannot be formatted: {error}"
            rest = memoryview(f"{line}\n".encode(errors="backslashreplace"))
            with contextlib.suppress(OSError):  # a full disk: the line is lost, and there is nowhere to say so
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
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    )
    lines: queue.Queue[logging.LogRecord | None] = queue.Queue(_QUEUE_LINES)
    writer = _Writer(lines, formatter, fd)
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


def _resolve_exception(
    logger: structlog.typing.WrappedLogger,  # noqa: ARG001 - structlog's signature
    method: str,  # noqa: ARG001
    event: structlog.typing.EventDict,
) -> structlog.typing.EventDict:
    """Look the current exception up where it is: the writing thread has none."""
    if event.get("exc_info") is True:
        event["exc_info"] = sys.exc_info()
    return event
