"""Who may come in: every key as its digest, and the caller whom it lets in. Reloaded while requests go on.

A file that cannot be read or understood, or says nothing at all, changes nothing: who was let in before stays in, and
the fault is told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from router.base.clock import Clock
from router.base.errors import ConfigError, in_words
from router.tenants.keys_file import PARAM, KeyLine, KeysFile, Kind, decode, digest_of, is_blank, read_bounded
from router.tenants.tenant import Caller, Tenant

log = structlog.get_logger("router.tenants")

_LOOK_EVERY_S = 1.0
_SETTLES_S = 0.1

Stamp = tuple[int, int, int]


class Directory:
    """Keys and callers. Reads happen on the event loop, each a lookup in a table that is replaced as a whole.

    Args:
        fixed: keys that stand in the configuration or the environment; they are not reloaded.
        path: the file of tenants and keys; None where there is none.
        max_priority: of tenants whose limits say nothing, and of callers of a tier without keys.

    Attributes:
        fault: why the file as it is now is not in force; empty where it is.
        listed: how many keys the file had when it was put into force.
        reloads: how often it has been read again.
    """

    def __init__(self, fixed: Sequence[KeyLine] = (), path: Path | None = None, max_priority: int = 0) -> None:
        self._fixed = tuple(fixed)
        self._path = path
        self._max_priority = max_priority
        self._stamp: Stamp | None = None
        self._keys: Mapping[tuple[Kind, str], Caller] = {}
        self._asked = asyncio.Event()
        self.nobody = Caller(max_priority=max_priority)
        self.tenants: Mapping[str, Tenant] = {}
        self.in_clear = 0
        self.fault = ""
        self.listed = 0
        self.reloads = 0

    @property
    def shut(self) -> bool:
        """There is a file, and no key in it or elsewhere: nobody is let in."""
        return not self._keys and self._path is not None

    @property
    def open(self) -> bool:
        """No keys are needed: there are none, and no file that may get some."""
        return not self._keys and self._path is None

    def __len__(self) -> int:
        return len(self._keys)

    def load(self) -> None:
        """Read the file for the first time.

        Raises:
            ConfigError: it cannot be read, or is none.
        """
        read = KeysFile()
        if self._path is not None:
            self._stamp, read = _read(self._path)
        self._put(read)

    def by_key(self, key: bytes) -> Caller | None:
        """Return whom a key lets in, None if it is not known; how long that takes tells nothing about other keys."""
        return self._keys.get(("key", digest_of(key)))

    def by_certificate(self, digest: str) -> Caller | None:
        """Return whom a client certificate lets in, by the SHA-256 of its DER."""
        return self._keys.get(("cert", digest))

    def by_tenant(self, digest: str) -> Caller | None:
        """Return whom work that a tenant left here is done for, None if it has no key any more."""
        if self.open:
            return self.nobody if digest == self.nobody.digest else None
        found = next((caller for caller in self._keys.values() if caller.digest == digest), None)
        return None if found is None else Caller(found.digest, found.max_priority, found.tenant)

    def ask(self) -> None:
        """Read the file again now, whether it seems to have changed or not: for a signal handler of the loop."""
        self._stamp = None
        self._asked.set()

    async def watch(self, clock: Clock) -> None:
        """Read the file again whenever it changes, or somebody asks; never returns."""
        if self._path is None:
            await asyncio.Event().wait()
            return
        while True:
            await self.refresh(self._path)
            self._asked.clear()
            sleeping = asyncio.ensure_future(clock.sleep(_LOOK_EVERY_S))
            asking = asyncio.ensure_future(self._asked.wait())
            try:
                await asyncio.wait({sleeping, asking}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sleeping.cancel()
                asking.cancel()

    async def refresh(self, path: Path) -> None:
        """Look at the file once, and put it into force if it is another one and is sound."""
        try:
            if await asyncio.to_thread(_stamp, path) == self._stamp:
                return
            settled = await asyncio.to_thread(_read_settled, path)
            if settled is None:
                return
            self._stamp, raw = settled  # also of what is none: it is told once, and looked at again when it changes
            if self.listed and is_blank(raw):
                raise ConfigError(  # noqa: TRY301 - one of the faults that are told below
                    f"{path} is empty, as a full disk or an editor leaves a file: put it back; to let nobody in, leave "
                    "a comment in it, as `overspill cloud keys revoke` does",
                    param=PARAM,
                )
            self._put(await asyncio.to_thread(decode, raw, str(path)))
        except ConfigError as error:
            self._complain(error.message)
        except OSError as error:
            self._stamp = None
            self._complain(f"{path}: {error.strerror or in_words(error)}")
        else:
            self.fault = ""
            self.reloads += 1
            log.info("keys reloaded", path=str(path), keys=len(self._keys), tenants=len(self.tenants))

    def _complain(self, why: str) -> None:
        if why != self.fault:
            log.error("keys not reloaded; those read before stay in force", why=why)
        self.fault = why

    def _put(self, read: KeysFile) -> None:
        lines = {(line.kind, line.digest): line for line in (*self._fixed, *read.keys.values())}
        tenants = {name: Tenant.named(name, limits) for name, limits in read.tenants.items()}
        for line in lines.values():
            if line.tenant not in tenants:
                clear = line.clear
                tenants[line.tenant] = Tenant.of_key(line.digest, line.priority) if clear else Tenant.named(line.tenant)
        self._keys = {at: self._caller(line, tenants[line.tenant]) for at, line in lines.items()}
        self.tenants = tenants
        self.listed = len(read.keys)
        self.in_clear = sum(line.clear for line in read.keys.values())

    def _caller(self, line: KeyLine, tenant: Tenant) -> Caller:
        priority = tenant.limits.priority
        ceiling = self._max_priority if priority is None else priority
        return Caller(tenant.digest, ceiling, tenant, line.device, line.role)


def _stamp(path: Path) -> Stamp:
    """What changes when a file does: which one it is, when it or who may read it was changed, its size."""
    found = path.stat()
    return found.st_ino, found.st_ctime_ns, found.st_size


def _read_settled(path: Path) -> tuple[Stamp, bytes] | None:
    """Read the file, None while it is being written: an editor that empties it first would let nobody in for a while.

    Raises:
        OSError: it cannot be read.
    """
    before = _stamp(path)
    time.sleep(_SETTLES_S)
    raw, after = read_bounded(path), _stamp(path)
    return (after, raw) if before == after else None


def _read(path: Path) -> tuple[Stamp, KeysFile]:
    """Read the file, and what it was when that began: a change meanwhile is then seen at the next look.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        stamp = _stamp(path)
        raw = read_bounded(path)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        remedy = f"; `overspill cloud keys add NAME --file {path}` makes it" if missing else ""
        raise ConfigError(f"{PARAM}: cannot read {path}: {error.strerror}{remedy}", param=PARAM) from None
    return stamp, decode(raw, str(path))
