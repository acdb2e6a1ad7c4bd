"""The steps of a batch beside its lines: checked, finalized, expired, cancelled. Each can be taken again after a crash.

A batch that is finalizing or cancelling takes no answers any more: its files are written from what is in the database,
and kept in the transaction that ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import orjson
import structlog
from sqlalchemy import Connection

from router.jobs import batches, events
from router.jobs.answers import not_run, refused
from router.jobs.database import Database, failed
from router.jobs.errors import NoSuchJob, StorageFailed
from router.jobs.files import Files, Incoming
from router.jobs.lines import Checked, LineFault, LineRules, body_of, check, faults_as_json
from router.jobs.records import (
    OUTPUT_PURPOSE,
    Batch,
    BatchStatus,
    Line,
    LineKind,
    StoredFile,
    new_id,
)
from router.jobs.settings import JobsSettings

log = structlog.get_logger("router.jobs")

_SHOWN_FAULTS = 100
_PIECE_LINES = 500
_DAY_S = 86_400


class Lifecycle:
    """Takes batches from one status to the next.

    Args:
        wall: Unix time, in seconds: windows survive restarts.
        max_line_bytes: of one line of an input file.
    """

    def __init__(
        self, database: Database, files: Files, settings: JobsSettings, wall: Callable[[], float], max_line_bytes: int
    ) -> None:
        self._database = database
        self._files = files
        self._settings = settings
        self._wall = wall
        self._max_line_bytes = max_line_bytes
        self._over_bytes = 0

    def is_late(self, batch: Batch) -> bool:
        """Whether its window has ended."""
        return self._wall() >= batch.expires_s

    def no_room(self) -> str:
        """Why no answer should be computed: it could not be kept; empty if it could."""
        if self._over_bytes > 0:
            return f"files and answers take {self._over_bytes} bytes more than jobs.max_mbytes: files must be deleted"
        try:
            self._files.require_disk(0)
        except StorageFailed as error:
            return error.message
        return ""

    def body_of(self, batch: Batch, line: Line) -> bytes:
        """Read the body of a line. Blocks.

        Raises:
            OSError: its file is gone, or is not what was checked.
        """
        return body_of(self._files.path(batch.input_file_id), line)

    def measured(self, held_bytes: int) -> None:
        """Everything that is kept was measured."""
        self._over_bytes = held_bytes - self._settings.max_mbytes * 1_000_000

    async def advance(self, batch: Batch) -> bool:
        """Take the step that is due, if one is; returns whether it was.

        Raises:
            StorageFailed: its files cannot be written now; it stays as it is.
        """
        if batch.status is BatchStatus.VALIDATING:
            await self._validate(batch)
        elif batch.status is BatchStatus.FINALIZING:
            await self._end(batch, BatchStatus.COMPLETED if batch.answered >= batch.total else BatchStatus.EXPIRED)
        elif batch.status is BatchStatus.CANCELLING:
            await self._end(batch, BatchStatus.CANCELLED)
        else:
            return False
        return True

    async def finalize(self, batch: Batch) -> None:
        """All is answered, or its window has ended: take no further answer."""
        step = partial(_move, batch.id, int(self._wall()), BatchStatus.FINALIZING, BatchStatus.IN_PROGRESS)
        await self._database.run(step)

    async def _validate(self, batch: Batch) -> None:
        rules = LineRules(batch.endpoint, self._settings.max_lines, self._max_line_bytes)
        try:
            await self._database.run(lambda c: self._files.get(c, batch.owner, batch.input_file_id))
            checked = await asyncio.to_thread(check, self._files.path(batch.input_file_id), batch.id, rules)
        except (NoSuchJob, FileNotFoundError):
            fault = LineFault("file_not_found", f"file `{batch.input_file_id}` is gone", param="input_file_id")
            checked = Checked(faults=[fault])
        except OSError as error:  # it is there, and may be read the next time
            raise failed(error) from error
        now_s = int(self._wall())
        if checked.faults:
            await self._fail(batch, checked.faults, now_s)
        else:
            await self._database.run(lambda c: batches.begin(c, batch.id, now_s, checked.lines))

    async def _fail(self, batch: Batch, faults: list[LineFault], now_s: int) -> None:
        incoming = await asyncio.to_thread(self._write, LineKind.ERROR, batch, [refused(batch.id, f) for f in faults])
        told = orjson.dumps(faults_as_json(faults, _SHOWN_FAULTS)).decode()

        def fail(connection: Connection) -> None:
            file = self._files.keep(connection, incoming, self._file_of(batch, LineKind.ERROR, incoming, now_s))
            to, before = BatchStatus.FAILED, BatchStatus.VALIDATING
            if batches.move(connection, batch.id, now_s, to, before, errors=told, error_file_id=file.id):
                self._tell(connection, batch.id, to, now_s)

        await self._files.keeping(self._database, fail)
        log.info("batch failed", batch=batch.id, faults=len(faults), first=faults[0].message)

    async def _end(self, batch: Batch, to: BatchStatus) -> None:
        """Write its files, and end it."""
        now_s = int(self._wall())
        written = {kind: await asyncio.to_thread(self._write, kind, batch, None) for kind in LineKind}

        def done(connection: Connection) -> None:
            files = {
                kind: self._files.keep(connection, incoming, self._file_of(batch, kind, incoming, now_s))
                for kind, incoming in written.items()
                if incoming.bytes
            }
            if batches.end(connection, batch, now_s, to, files):
                self._tell(connection, batch.id, to, now_s)

        await self._files.keeping(self._database, done)
        for incoming in written.values():
            incoming.drop()
        log.info("batch ended", batch=batch.id, status=to.value, completed=batch.completed, failed=batch.failed)

    def _tell(self, connection: Connection, batch_id: str, status: BatchStatus, now_s: int) -> None:
        if self._settings.webhook_url:
            events.add(connection, f"batch.{status.value}", {"id": batch_id}, now_s)

    def _write(self, kind: LineKind, batch: Batch, lines: list[bytes] | None) -> Incoming:
        """Write one of its files, from the database where no lines are given. Blocks."""
        incoming = self._files.begin(f"{batch.id}.{kind.value}", bounded=False)
        try:
            for line in self._lines(kind, batch) if lines is None else lines:
                incoming.write(line)
            incoming.flush()
        except BaseException:
            incoming.drop()
            raise
        return incoming

    def _lines(self, kind: LineKind, batch: Batch) -> Iterator[bytes]:
        """Yield the lines of one file. Nothing of it changes any more, so pages of it make a whole."""
        after = 0
        while page := self._database.run_here(partial(_answers, batch.id, kind, after)):
            yield from (text for _, text in page)
            after = page[-1][0]
        after = 0
        while kind is LineKind.ERROR:
            lines = self._database.run_here(partial(_unanswered, batch.id, after))
            if not lines:
                return
            yield from (not_run(batch, line) for line in lines)
            after = lines[-1].number

    def _file_of(self, batch: Batch, kind: LineKind, incoming: Incoming, now_s: int) -> StoredFile:
        keep_s = batch.keep_output_s or int(self._settings.keep_days * _DAY_S)
        name = f"{batch.id}_{kind.value}.jsonl"
        return StoredFile(
            new_id("file-", self._wall()), batch.owner, OUTPUT_PURPOSE, name, incoming.bytes, now_s, now_s + keep_s
        )


def _move(batch_id: str, now_s: int, to: BatchStatus, before: BatchStatus, connection: Connection) -> bool:
    return batches.move(connection, batch_id, now_s, to, before)


def _answers(batch_id: str, kind: LineKind, after: int, connection: Connection) -> list[tuple[int, bytes]]:
    return batches.answers_after(connection, batch_id, kind, after, _PIECE_LINES)


def _unanswered(batch_id: str, after: int, connection: Connection) -> list[Line]:
    return batches.unanswered(connection, batch_id, after, _PIECE_LINES)
