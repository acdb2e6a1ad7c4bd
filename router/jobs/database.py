"""The database of jobs, on a thread of its own: a transaction is a function of a connection.

SQLite keeps a write-ahead log and flushes it with every commit, so that what was committed survives a lost machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, Engine, create_engine, event, insert, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    NotSupportedError,
    ProgrammingError,
    SQLAlchemyError,
)

from router.base.errors import ConfigError, OverspillError, in_words
from router.base.held_file import HeldFile
from router.base.store_place import file_fault
from router.jobs.errors import StorageFailed, StorageFull
from router.jobs.schema import FACTS, METADATA, SCHEMA

log = structlog.get_logger("router.jobs")

T = TypeVar("T")

_RETRY_S = 10.0
_BUSY_S = 10.0
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FAILING_DISK = {*_NO_ROOM, errno.EROFS, errno.EIO}
_FAILING = re.compile("full|disk I/O error", re.IGNORECASE)  # as SQLite words it
_DAMAGED = re.compile("malformed|not a database", re.IGNORECASE)
_REMEDY = "if the file is damaged, move it away: batches and files are then forgotten, and the files set aside"
_GONE = (
    "{file} was deleted or replaced while this tier has it open: put it back, or start the tier again, which forgets "
    "the batches and files that stood in it"
)
_OURS = (DataError, IntegrityError, NotSupportedError, ProgrammingError)  # mistakes of ours: the log has to show them


class Database:
    """Opened by `open`, closed by `close`; in between `run` is safe from the event loop.

    Args:
        url: an SQLAlchemy URL.
        place: makes ready what lies beside the database, and tells this tier's folder of files from others'; a database
            belongs to one of them.
        begun: called when the database turns out to be a new one, which knows nothing of what lies there.

    Attributes:
        fault: why it could not be opened, or written to as it was gone, when that was tried last; empty where it could.
    """

    def __init__(self, url: str, place: Callable[[], str], begun: Callable[[], None]) -> None:
        self._url = url
        self._place = place
        self._begun = begun
        self._closed = False
        self.fault = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs-database")
        self._engine: Engine | None = None
        self._file: HeldFile | None = None
        self._lock = threading.Lock()  # `run_here` may come from another thread

    def open(self) -> Engine:
        """Connect, and make the tables that are missing; raises as `_connect` does."""
        try:
            self._engine = self._connect()
            self._file = _file_of(self._engine)
        except OverspillError as error:
            self.fault = error.message
            raise
        self.fault = ""
        return self._engine

    def _connect(self) -> Engine:
        """Open the database, whose tables are there then.

        Raises:
            ConfigError: the URL is none, its driver is missing, or the database is another tier's, or newer.
            StorageFailed: the disk is full or fails, or SQLite's file is damaged; each `run` opens it again.
        """
        try:
            with _told():
                place = self._place()
                engine = _engine(self._url)
                with engine.begin() as connection:
                    METADATA.create_all(connection)
                    if _claim(connection, place):
                        self._begun()
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise _no_database(error) from None
        except (SQLAlchemyError, StorageFailed) as error:
            if isinstance(error, StorageFailed) and _is_failing_disk(error):
                raise
            if isinstance(error, StorageFailed) and _DAMAGED.search(error.message):
                raise StorageFailed(f"{error.message}; {_REMEDY}", retry_after_s=_RETRY_S) from error
            raise _unusable(self._url, error.orig if isinstance(error, DBAPIError) else error) from None
        return engine

    @staticmethod
    def look(url: str) -> None:
        """See what `open` would refuse, as far as that can be told without making or changing anything.

        Raises:
            ConfigError: as `open`.
        """
        try:
            engine = _engine(url)
            file = Path(engine.url.database or "") if engine.dialect.name == "sqlite" else None
            if file is None:
                engine.connect().close()
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise _no_database(error) from None
        except SQLAlchemyError as error:
            raise _unusable(url, error.orig if isinstance(error, DBAPIError) else error) from None
        if file is not None and (why := file_fault(file)):
            raise _unusable(url, why)

    def close(self) -> None:
        """Finish what was begun."""
        self._closed = True
        self._thread.shutdown(wait=True)
        if self._engine is not None:
            self._engine.dispose()

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Do `work` in one transaction; a caller that is cancelled leaves it running to its end.

        Raises:
            StorageFailed: the disk has no room or does not take it, the database is locked, damaged, replaced or away.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.run_here, work)

    def run_here(self, work: Callable[[Connection], T]) -> T:
        """The same on the thread that calls."""
        with self._lock, _told(), self._opened().begin() as connection:
            return work(connection)

    def _opened(self) -> Engine:
        if self._closed:
            raise StorageFailed("the database of jobs is closed", retry_after_s=_RETRY_S)
        if self._engine is None:
            try:
                opened = self.open()
            except ConfigError as error:
                raise StorageFailed(error.message, retry_after_s=_RETRY_S) from error
            log.info("the database of jobs was opened")
            return opened
        if self._file is not None:
            gone = self._file.change() in {"deleted", "replaced"}
            self.fault = _GONE.format(file=Path(self._engine.url.database or "").name) if gone else ""
            if gone:
                raise StorageFailed(self.fault, retry_after_s=_RETRY_S)
        return self._engine


def _no_database(error: Exception) -> ConfigError:
    return ConfigError(
        f"jobs.database: {in_words(error)}; give a URL of SQLAlchemy, and install its driver, such as "
        "psycopg[binary] for postgresql+psycopg://",
        param="jobs.database",
    )


def _unusable(url: str, why: object) -> ConfigError:
    shown = make_url(url).render_as_string()
    return ConfigError(f"jobs.database: cannot use {shown}: {why}; {_REMEDY}", param="jobs.database")


def _file_of(engine: Engine) -> HeldFile | None:
    path = Path(engine.url.database or "")
    return HeldFile(path) if engine.dialect.name == "sqlite" and path.is_file() else None


def _claim(connection: Connection, place: str) -> bool:
    """Check whose it is, or make it this tier's; returns whether it was new."""
    facts = dict(tuple(row) for row in connection.execute(select(FACTS.c.name, FACTS.c.value)))
    if not facts:
        connection.execute(insert(FACTS), [{"name": "schema", "value": str(SCHEMA)}, {"name": "place", "value": place}])
        return True
    version = facts.get("schema", "")
    if not version.isdecimal():
        raise ConfigError(
            f"jobs.database: its table `facts` tells `{version[:40]}` for a version: it is damaged, or another "
            "program's; name another database",
            param="jobs.database",
        )
    if int(version) > SCHEMA:
        raise ConfigError(
            f"jobs.database: its tables are of version {version}, this release knows {SCHEMA}: "
            "run a newer release, or name another database",
            param="jobs.database",
        )
    if facts.get("place") != place:
        raise ConfigError(
            "jobs.database: it belongs to another tier, or to another folder of files than jobs.dir: "
            "name a database of its own for each tier",
            param="jobs.database",
        )
    return False


def _is_failing_disk(error: StorageFailed) -> bool:
    """Whether waiting may help, and nothing that an operator has configured is at fault."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in _FAILING_DISK
    return _FAILING.search(error.message) is not None


def _engine(url: str) -> Engine:
    # A server that was away is connected to again; what callers send stands in no error, for errors are logged.
    engine = create_engine(url, pool_pre_ping=True, hide_parameters=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare)
    return engine


def _prepare(connection: Any, _: object) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={int(_BUSY_S * 1000)}", "temp_store=MEMORY"):
        connection.execute(f"PRAGMA {pragma}")


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn what a disk or a database raises that is full, locked, damaged or away into `StorageFailed`."""
    try:
        yield
    except DBAPIError as error:
        if isinstance(error, _OURS):
            raise
        kind = StorageFull if "full" in str(error.orig).lower() else StorageFailed
        raise kind(f"the database of jobs cannot be used: {error.orig}", retry_after_s=_RETRY_S) from error
    except OSError as error:
        raise failed(error) from error


def failed(error: OSError) -> StorageFailed:
    """Return what a caller is told of an error of the file system."""
    kind = StorageFull if error.errno in _NO_ROOM else StorageFailed
    return kind(f"what jobs need cannot be read or written: {error.strerror}", retry_after_s=_RETRY_S)
