"""The table of usage in a database: SQLite in a file, or anything that SQLAlchemy has a dialect for."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from router.base.errors import ConfigError, in_words
from router.base.held_file import HeldFile
from router.base.host import on_read_only_disk
from router.base.store_place import file_fault
from router.tenants.damaged import is_foreign, readable_rows, set_aside, tells_damage
from router.tenants.used import Counts, UsageKey, UsageRow

log = structlog.get_logger("router.tenants")

PARAM = "tenants.database"
_BUSY_MS = 5_000
_FAILING = re.compile("full|disk I/O error", re.IGNORECASE)  # as SQLite words it

_METADATA = MetaData()
_USAGE = Table(
    "overspill_usage",
    _METADATA,
    Column("day", String(10), primary_key=True),
    Column("tenant", String(64), primary_key=True),
    Column("device", String(64), primary_key=True),
    Column("model", String(256), primary_key=True),
    *(Column(name, BigInteger, nullable=False) for name in Counts.__struct_fields__),
)


class UsageDatabase:
    """Opened, used and closed by one thread at a time.

    Args:
        url: an SQLAlchemy URL, or the path of an SQLite file.

    Attributes:
        damaged: what became of a file of SQLite that was found damaged, deleted, replaced or of 0 bytes; empty where
            none was.
    """

    def __init__(self, url: str) -> None:
        self._url = url if "://" in url else f"sqlite:///{Path(url).expanduser().absolute()}"
        self._engine: Engine | None = None
        self._made = False
        self._held: HeldFile | None = None
        self.damaged = ""

    def open(self, *, make: bool = True) -> None:
        """Connect. On a disk that is full, read-only or failing the table is made by the first exchange that can.

        Args:
            make: the table, and SQLite's file, where there is none or a damaged one, which is kept under another name;
                else nothing is made, and that is an error.

        Raises:
            ConfigError: the URL is none, its driver is missing, or the database cannot be used; or the file is no
                database, which a mistyped path is enough for: it stays as it is.
        """
        try:
            self._engine = create_engine(self._url)
            if not make:
                self._expect_usage()
            if self._engine.dialect.name == "sqlite":
                event.listen(self._engine, "connect", _prepare)
            file = self._file()
            if make and file is not None and file.is_file() and not file.stat().st_size:
                self._tell(f"{file} had 0 bytes: usage is counted anew in it, and so are budgets")
            if make:
                _METADATA.create_all(self._engine)
                self._check()
            self._made = True
            self._hold()
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise ConfigError(f"{PARAM}: {in_words(error)}", param=PARAM) from None
        except SQLAlchemyError as error:
            why = getattr(error, "orig", None) or error
            if make and (_FAILING.search(str(why)) or self._is_read_only()):
                return
            if tells_damage(why) and self._is_foreign():
                raise self._foreign() from None
            if make and not self.damaged and tells_damage(why) and self._begin_anew(str(why)):
                return
            raise self._unusable(why) from None

    def look(self) -> None:
        """See what `open` would refuse, as far as that can be told without making or changing anything.

        Raises:
            ConfigError: as `open`.
        """
        try:
            engine, file = create_engine(self._url), self._file()
            if file is None:
                engine.connect().close()
                return
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise ConfigError(f"{PARAM}: {in_words(error)}", param=PARAM) from None
        except SQLAlchemyError as error:
            raise self._unusable(getattr(error, "orig", None) or error) from None
        if why := file_fault(file):
            raise self._unusable(why)
        if self._is_foreign():
            raise self._foreign()

    def _unusable(self, why: object) -> ConfigError:
        shown = make_url(self._url).render_as_string()
        return ConfigError(f"{PARAM}: cannot use {shown}: {why}; name another file, or make its folder", param=PARAM)

    def _foreign(self) -> ConfigError:
        return ConfigError(
            f"{PARAM}: {self._file()} is a file, but no database of SQLite; name another file, or move this one away",
            param=PARAM,
        )

    def _expect_usage(self) -> None:
        """See that the table is there; a mistyped name is no month without usage.

        Raises:
            ConfigError: it is not.
        """
        url = make_url(self._url)
        remedy = "name the one of the tier's `tenants.database`"
        if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
            raise ConfigError(f"{PARAM}: {url.database}: there is none; {remedy}", param=PARAM)
        if not inspect(self._engine).has_table(_USAGE.name):
            raise ConfigError(f"{PARAM}: {url.render_as_string()} holds no usage; {remedy}", param=PARAM)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def exchange(self, new: Mapping[UsageKey, Counts], month: str) -> Counter[str]:
        """Add what is new, in one transaction; return the tokens of each tenant in a month, such as `2026-11`."""
        self._find_again()
        try:
            with self._begin() as connection:
                for key, counts in new.items():
                    _add(connection, key, counts)
                spent = _spent(connection, month)
        except SQLAlchemyError as error:
            if self._engine is not None:  # what was opened on a read-only disk stays read-only
                self._engine.dispose()
            # What was open here before is ours, whatever has become of it; what took its place may be anybody's.
            if tells_damage(error) and (self._held is not None or not self._is_foreign()):
                self._begin_anew(str(getattr(error, "orig", None) or error))
            raise
        if self._held is None:
            self._hold()
        return spent

    def _hold(self) -> None:
        """Remember which file it is that is open now."""
        file = self._file()
        self._held = HeldFile(file) if file is not None and file.is_file() else None

    def _find_again(self) -> None:
        """See that what is open still stands where it was; what was deleted is written anew from what is open.

        Raises:
            OSError: that cannot be done.
        """
        file, change = self._file(), self._held.change() if self._held is not None else ""
        if not change or file is None or self._engine is None:
            return
        what = {
            "emptied": "cut to 0 bytes while this tier had it open: usage is counted anew, and so are budgets",
            "replaced": "replaced while this tier had it open: usage and budgets go by what stands there now",
        }
        if change == "deleted":
            rows = _write_anew(self._engine, file)
            what[change] = f"deleted while this tier had it open: it was written anew, with all its {rows} rows"
        self._engine.dispose()
        self._made, self._held = False, None
        self._tell(f"{file} was {what[change]}")

    def _tell(self, what: str) -> None:
        self.damaged = what
        log.error("the database of usage is not what it was", what=what)

    def spent(self, month: str) -> Counter[str] | None:
        """Return the tokens of each tenant in a month without writing anything; None where that cannot be read.

        SQLite shares its log of changes by a file, for which a full disk has no room: it is read alone. On a disk that
        is read-only nothing can be locked.
        """
        file = self._file()
        if file is None:
            return None
        for mode, pragma in (("mode=rw", "PRAGMA locking_mode=EXCLUSIVE"), ("immutable=1", "PRAGMA query_only=1")):

            def connect(mode: str = mode, pragma: str = pragma) -> sqlite3.Connection:
                opened = sqlite3.connect(f"{file.as_uri()}?{mode}", uri=True)
                opened.execute(pragma)
                return opened

            with (
                contextlib.suppress(SQLAlchemyError),
                create_engine("sqlite://", creator=connect, poolclass=NullPool).connect() as connection,
            ):
                return _spent(connection, month)
        return None

    def rows(self, since: str, until: str) -> list[UsageRow]:
        """Return what was used from one day to another, both included."""
        wanted = select(_USAGE).where(_USAGE.c.day.between(since, until)).order_by(*_USAGE.primary_key.columns)
        with self._begin() as connection:
            return [
                UsageRow(UsageKey(tenant, device, model, day), Counts(*counts))
                for day, tenant, device, model, *counts in connection.execute(wanted)
            ]

    def _check(self) -> None:
        """See that SQLite can read all of its file.

        Raises:
            SQLAlchemyError: it cannot.
        """
        if self._engine is None or self._engine.dialect.name != "sqlite":
            return
        with self._engine.connect() as connection:
            said = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if said != "ok":
            raise DatabaseError("PRAGMA quick_check", None, sqlite3.DatabaseError(f"malformed: {said}"))

    def _begin_anew(self, why: str) -> bool:
        """Keep a damaged file of SQLite under another name, and begin a new one with what can be read of it.

        Returns:
            Whether that was done: the folder may take no other file.
        """
        file = self._file()
        if file is None or self._engine is None:
            return False
        self._engine.dispose()
        rows = readable_rows(file, _USAGE.name, _USAGE.columns.keys())
        try:
            aside = set_aside(file)
        except OSError as error:
            log.warning("the damaged database of usage stays where it is", path=str(file), why=str(error))
            return False
        kept = [(UsageKey(tenant, device, model, day), counts) for day, tenant, device, model, *counts in rows]
        whole = [(key, Counts(*counts)) for key, counts in kept if _is_row(key, counts)]
        self._made, self._held = False, None
        with self._begin() as connection:
            for key, counts in whole:
                _add(connection, key, counts)
        read = f"{len(whole)} rows of it could be read"
        self.damaged = f"{file} was damaged ({why}): it is kept as {aside}; {read}, and budgets go by these"
        log.error(
            "the database of usage was damaged; it begins anew", kept_as=str(aside), rows_read=len(whole), why=why
        )
        return True

    def _file(self) -> Path | None:
        """Return where SQLite keeps it; None for other databases."""
        url = make_url(self._url)
        return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None

    def _is_foreign(self) -> bool:
        """Whether the file is none that SQLite wrote, and therefore nothing of ours."""
        file = self._file()
        try:
            return file is not None and file.is_file() and is_foreign(file)
        except OSError:
            return True

    def _is_read_only(self) -> bool:
        file = self._file()
        return file is not None and on_read_only_disk(file)

    def _begin(self) -> Any:
        if self._engine is None:
            raise ConfigError(f"{PARAM}: the database is closed", param=PARAM)
        if not self._made:
            _METADATA.create_all(self._engine)
            self._made = True
        return self._engine.begin()


def _write_anew(engine: Engine, file: Path) -> int:
    """Write what an engine has open to a file of the name that it had; returns the number of its rows.

    Raises:
        OSError: the disk does not take it.
    """
    for left in (file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
        left.unlink(missing_ok=True)  # of the file that is gone: they say nothing about the one to come
    try:
        with engine.connect() as connection:
            rows = connection.execute(select(func.count()).select_from(_USAGE)).scalar_one()
            connection.commit()
            connection.exec_driver_sql("VACUUM INTO ?", (str(file),))
    except SQLAlchemyError as error:
        why = getattr(error, "orig", None) or error
        raise OSError(f"{file} was deleted, and cannot be written anew: {why}") from error
    return rows


def _is_row(key: UsageKey, counts: Sequence[object]) -> bool:
    """Whether what a damaged file holds is a row of usage."""
    texts = (key.tenant, key.device, key.model, key.day)
    return all(isinstance(text, str) for text in texts) and all(isinstance(n, int) and n >= 0 for n in counts)


def _spent(connection: Connection, month: str) -> Counter[str]:
    tokens = func.sum(_USAGE.c.prompt_tokens + _USAGE.c.completion_tokens)
    found = connection.execute(
        select(_USAGE.c.tenant, tokens).where(_USAGE.c.day.startswith(month)).group_by(_USAGE.c.tenant)
    )
    return Counter({tenant: int(total) for tenant, total in found})


def _add(connection: Connection, key: UsageKey, counts: Counts) -> None:
    """Add to a row; two tiers that make the same one at once are no fault."""
    where = {"tenant": key.tenant, "device": key.device, "model": key.model, "day": key.day}
    added = {name: getattr(counts, name) for name in Counts.__struct_fields__}
    more = update(_USAGE).values({name: _USAGE.c[name] + value for name, value in added.items()})
    for name, value in where.items():
        more = more.where(_USAGE.c[name] == value)
    if connection.execute(more).rowcount:
        return
    try:
        with connection.begin_nested():
            connection.execute(insert(_USAGE).values({**where, **added}))
    except IntegrityError:
        connection.execute(more)


def _prepare(connection: Any, _: object) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={_BUSY_MS}"):
        connection.execute(f"PRAGMA {pragma}")
