"""Files on disk, each with a row that says whose it is. The row is written last and deleted first.

So a row always has its file, whole and flushed. A file without a row is left over from a crash, or from a row that the
database did not take, and swept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import structlog
from sqlalchemy import Connection, delete, func, insert, select

from router.base.errors import InvalidRequest
from router.jobs.database import Database, failed
from router.jobs.errors import FileTooLarge, NoSuchJob, QuotaReached, StorageFailed, StorageFull
from router.jobs.pages import Page, page_of
from router.jobs.records import ENDED, StoredFile
from router.jobs.schema import BATCHES, FILES
from router.jobs.settings import JobsSettings

log = structlog.get_logger("router.jobs")

T = TypeVar("T")

_RETRY_S = 60.0
_MB = 1_000_000


class Incoming:
    """A file that is being written; it is no file of anybody before `Files.keep`. Blocks on the disk.

    Args:
        grow: called before it grows, with its bytes so far and then; raises what speaks against it.
    """

    def __init__(self, path: Path, grow: Callable[[int, int], None] | None = None) -> None:
        self.path = path
        self.bytes = 0
        self._grow = grow
        self._file = path.open("xb")

    def write(self, piece: bytes) -> None:
        """Append.

        Raises:
            FileTooLarge: it is longer than one file may be.
            StorageFailed: the disk has no room, or does not take it.
        """
        grown = self.bytes + len(piece)
        if self._grow is not None:
            self._grow(self.bytes, grown)
        self.bytes = grown
        try:
            self._file.write(piece)
        except OSError as error:
            raise failed(error) from error

    def flush(self) -> None:
        """Bring it to the disk, for certain."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise failed(error) from error

    def drop(self) -> None:
        """Forget it; nothing once it was kept."""
        with contextlib.suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


class Files:
    """The folder of files. Methods that take a connection run inside a transaction."""

    def __init__(self, folder: Path, settings: JobsSettings) -> None:
        self._kept = folder / "files"
        self._incoming = folder / "incoming"
        self._settings = settings
        self.folder = folder

    def prepare(self) -> None:
        """Make the folders, and forget what an earlier run had not finished to write."""
        shutil.rmtree(self._incoming, ignore_errors=True)
        for folder in (self._kept, self._incoming):
            folder.mkdir(parents=True, exist_ok=True)

    def set_aside(self) -> None:
        """Keep what lies here where nothing deletes it: its database was lost, moved away or emptied.

        Raises:
            OSError: it cannot be moved.
        """
        if not any(self._kept.iterdir()):
            return
        aside = self._kept.with_name(f"files.of-a-lost-database-{uuid.uuid4().hex[:8]}")
        self._kept.rename(aside)
        self._kept.mkdir()
        log.warning("the database of jobs is new: files that it does not know were set aside", folder=str(aside))

    def sweep(self, connection: Connection) -> None:
        """Delete what no row names."""
        known = set(connection.execute(select(FILES.c.id)).scalars())
        for path in self._kept.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    async def keeping(self, database: Database, work: Callable[[Connection], T]) -> T:
        """Do a transaction that keeps files; those of one that failed go at once: whoever tries again needs their room.

        Raises:
            StorageFailed: the database did not take it.
        """
        try:
            return await database.run(work)
        except StorageFailed:
            with contextlib.suppress(StorageFailed):
                await database.run(self.sweep)
            raise

    def path(self, file_id: str) -> Path:
        return self._kept / file_id

    def require_room(self, connection: Connection, owner: str, more_bytes: int) -> None:
        """Check what may still be stored.

        Raises:
            QuotaReached: the caller keeps as much as one may, or all callers do.
            StorageFull: the disk has to keep some room for others.
            StorageFailed: nobody can tell whether it does.
        """
        settings = self._settings
        mine = self._held_bytes(connection, owner)
        if mine + more_bytes > settings.max_caller_mbytes * _MB:
            raise QuotaReached(
                f"you keep {mine} bytes of files here, and may keep {settings.max_caller_mbytes * _MB}: delete some",
                retry_after_s=_RETRY_S,
            )
        self.require_disk(more_bytes)
        if self._held_bytes(connection) + more_bytes > settings.max_mbytes * _MB:
            raise StorageFull(
                "the files of all callers take all the room that this tier gives them: send it again later",
                retry_after_s=_RETRY_S,
            )

    def require_disk(self, more_bytes: int) -> None:
        """Check that the disk keeps some room for others.

        Raises:
            StorageFull: it would not.
            StorageFailed: nobody can tell.
        """
        try:
            free = shutil.disk_usage(self.folder).free - more_bytes
        except OSError as error:
            raise failed(error) from error
        if free < self._settings.min_free_mbytes * _MB:
            raise StorageFull(
                "the disk of this tier has no more room for files of jobs: send it again later", retry_after_s=_RETRY_S
            )

    def _held_bytes(self, connection: Connection, owner: str | None = None) -> int:
        held = select(func.coalesce(func.sum(FILES.c.bytes), 0))
        if owner is not None:
            held = held.where(FILES.c.owner == owner)
        return int(connection.execute(held).scalar_one())

    def held_bytes(self, connection: Connection) -> int:
        """Return what all files take."""
        return self._held_bytes(connection)

    def begin(self, file_id: str, *, bounded: bool = True) -> Incoming:
        """Begin to write a file.

        Args:
            bounded: it may be as large as an upload, and leaves the disk what is for others: more than was announced
                may come, and others write too. The tier's own files are what a batch ends with.

        Raises:
            StorageFailed: the disk does not take it.
        """
        path = self._incoming / file_id
        try:
            path.unlink(missing_ok=True)
            return Incoming(path, self._grow if bounded else None)
        except OSError as error:
            raise failed(error) from error

    def _grow(self, before_bytes: int, after_bytes: int) -> None:
        most_bytes = self._settings.max_file_mbytes * _MB
        if after_bytes > most_bytes:
            raise FileTooLarge(
                f"the file is larger than the {most_bytes} bytes that this tier keeps of one: split it", param="file"
            )
        self.require_disk(after_bytes - before_bytes)

    def keep(self, connection: Connection, incoming: Incoming, file: StoredFile) -> StoredFile:
        """Make a flushed file one of its owner's. Doing it again after a crash does no harm."""
        target = self.path(file.id)
        incoming.path.replace(target)
        _flush_folder(self._kept)
        connection.execute(delete(FILES).where(FILES.c.id == file.id))
        connection.execute(insert(FILES).values(**asdict(file)))
        return file

    def get(self, connection: Connection, owner: str, file_id: str) -> StoredFile:
        """Return a file of this caller.

        Raises:
            NoSuchJob: there is none of that id.
        """
        rows = connection.execute(select(FILES).where(FILES.c.id == file_id, FILES.c.owner == owner))
        found = rows.mappings().first()
        if found is None:
            raise NoSuchJob(f"there is no file `{file_id[:64]}` of yours here", param="file_id")
        return StoredFile(**found)

    def list_page(
        self, connection: Connection, owner: str, page: Page, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """Return a page of a caller's files, and whether there are more."""
        query = select(FILES).where(FILES.c.owner == owner)
        if purpose is not None:
            query = query.where(FILES.c.purpose == purpose)
        rows, more = page_of(connection, query, FILES.c.id, page)
        return [StoredFile(**row) for row in rows], more

    def delete(self, connection: Connection, owner: str, file_id: str) -> None:
        """Delete a file of this caller; its bytes go with `unlink`, once that is committed.

        Raises:
            NoSuchJob: there is none of that id.
            InvalidRequest: a batch that has not ended reads it.
        """
        self.get(connection, owner, file_id)
        reading = select(BATCHES.c.id).where(
            BATCHES.c.input_file_id == file_id, BATCHES.c.status.not_in([status.value for status in ENDED])
        )
        batch = connection.execute(reading).scalar()
        if batch is not None:
            raise InvalidRequest(
                f"file `{file_id}` is read by batch `{batch}`, which has not ended: cancel that first", param="file_id"
            )
        connection.execute(delete(FILES).where(FILES.c.id == file_id))

    def unlink(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    def expire(self, connection: Connection, now_s: float) -> list[str]:
        """Forget files whose time is over, but for those that running batches read; returns what to unlink."""
        reading = select(BATCHES.c.input_file_id).where(BATCHES.c.status.not_in([status.value for status in ENDED]))
        over = select(FILES.c.id).where(FILES.c.expires_s <= now_s, FILES.c.id.not_in(reading))
        ids = list(connection.execute(over).scalars())
        if ids:
            connection.execute(delete(FILES).where(FILES.c.id.in_(ids)))
        return ids


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
