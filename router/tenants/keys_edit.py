"""Changes of the file of tenants and keys: line by line, so that comments and order stay; whole or not at all."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from router.base.errors import ConfigError
from router.tenants.keys_file import (
    NOBODY,
    PARAM,
    KeyLine,
    KeysFile,
    Kind,
    decode,
    digest_of,
    is_blank,
    read_bounded,
    words_of,
)
from router.tenants.tenant import NAME, Limits, Role

_KEY_BYTES = 32
_PREFIX = "osk-"
_LEAST_ID_CHARS = 4


@dataclass(frozen=True, slots=True)
class NewKey:
    """What a key is to be.

    Attributes:
        certificate: the digest of a client certificate, where that is to open the tier instead of a key.
    """

    tenant: str
    device: str = ""
    role: Role = Role.CALLER
    certificate: str | None = None


def read_keys(path: Path) -> KeysFile:
    """Read a file.

    Raises:
        ConfigError: it is not there, cannot be read, or is none.
    """
    if not path.exists():
        raise ConfigError(f"there is no file {path}: `overspill cloud keys add NAME` makes one", param=PARAM)
    return decode(_raw(path), str(path))


def add_key(
    path: Path, new: NewKey, limits: Mapping[str, object], *, today: Callable[[], dt.date] = dt.date.today
) -> str:
    """Add a key to a tenant, which need not be there yet; return the key, which stands nowhere else.

    Args:
        limits: fields of `Limits` to set; None of a field takes its bound away.

    Returns:
        The key, empty for a certificate.

    Raises:
        ConfigError: a name or a limit is none, or the file cannot be written.
    """
    _check_name(new.tenant, "the tenant")
    if new.device:
        _check_name(new.device, "the device")
    key = "" if new.certificate else f"{_PREFIX}{secrets.token_urlsafe(_KEY_BYTES)}"
    kind: Kind = "cert" if new.certificate else "key"
    words = [kind, new.tenant, f"sha256:{new.certificate or digest_of(key.encode())}"]
    words += [f"device={new.device}"] if new.device else []
    words += [f"role={new.role.value}"] if new.role is not Role.CALLER else []
    words.append(f"created={today().isoformat()}")
    with _editing(path) as lines:
        if NOBODY in lines:
            lines.remove(NOBODY)
        if limits:
            _put_limits(lines, new.tenant, limits, str(path))
        lines.append(" ".join(words))
    return key


def set_limits(path: Path, tenant: str, limits: Mapping[str, object]) -> Limits:
    """Change limits of a tenant that is there; return all of them.

    Raises:
        ConfigError: there is no such tenant, a limit is none, or the file cannot be written.
    """
    with _editing(path) as lines:
        known = decode("\n".join(lines).encode(), str(path))
        if tenant not in known.tenants and all(key.tenant != tenant for key in known.keys.values()):
            raise ConfigError(
                f"{path}: there is no tenant `{tenant}`: `overspill cloud keys list` names them", param=PARAM
            )
        _put_limits(lines, tenant, limits, str(path))
        return decode("\n".join(lines).encode(), str(path)).limits_of(tenant)


def revoke(path: Path, what: str) -> list[KeyLine]:
    """Take away the key whose digest begins with `what`, or every key of the tenant of that name; return them.

    Raises:
        ConfigError: there is none, or more than one key begins so.
    """
    with _editing(path) as lines:
        known = decode("\n".join(lines).encode(), str(path))
        gone = [key for key in known.keys.values() if key.tenant == what]
        if not gone and len(what) >= _LEAST_ID_CHARS:
            gone = [key for key in known.keys.values() if key.digest.startswith(what)]
            if len(gone) > 1:
                raise ConfigError(f"{path}: {len(gone)} keys begin with `{what}`: give more of the id", param=PARAM)
        if not gone:
            raise ConfigError(f"{path}: no tenant and no key is `{what[:64]}`: `keys list` names them", param=PARAM)
        for number in sorted({key.number for key in gone}, reverse=True):
            del lines[number - 1]
        if is_blank("".join(lines).encode()):
            lines[:] = [NOBODY]  # running tiers take a file without a word for a lost one
    return gone


def seal(path: Path) -> list[KeyLine]:
    """Replace keys in clear by their digests; who sends them notices nothing. Return them."""
    with _editing(path) as lines:
        known = decode("\n".join(lines).encode(), str(path))
        clear = [key for key in known.keys.values() if key.clear]
        for number in sorted({key.number for key in clear}, reverse=True):
            here = [key for key in clear if key.number == number]
            comment = lines[number - 1].partition("#")[2].strip()
            sealed = [f"# {comment}"] if comment else []
            for key in here:
                if key.priority is not None:
                    sealed.append(f"tenant {key.tenant} priority={key.priority}")
                sealed.append(f"key {key.tenant} sha256:{key.digest} role={key.role.value}")
            lines[number - 1 : number] = sealed
    return clear


def _put_limits(lines: list[str], tenant: str, limits: Mapping[str, object], name: str) -> None:
    known = decode("\n".join(lines).encode(), name).limits_of(tenant)
    merged = {field: limits.get(field, getattr(known, field)) for field in Limits.__struct_fields__}
    words = ["tenant", tenant]
    for field, value in merged.items():
        text = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else value
        words += [f"{field}={text}"] if text not in {None, ""} else []
    line = " ".join(words)
    for index, present in enumerate(lines):
        if words_of(present)[:2] == ["tenant", tenant]:
            lines[index] = line
            return
    lines.append(line)


def _check_name(name: str, what: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(f"`{name[:80]}`: the name of {what} is up to 64 letters, digits and . _ -", param=PARAM)


@contextlib.contextmanager
def _editing(path: Path) -> Iterator[list[str]]:
    """Yield the lines of a file, and put them in its place once they have been changed, if they can be read then.

    Raises:
        ConfigError: it cannot be read or written, or would be none.
    """
    try:
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; make its folder first", param=PARAM) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _raw(path)
        decode(before, str(path))
        lines = before.decode().splitlines()
        yield lines
        after = "".join(f"{line}\n" for line in lines).encode()
        decode(after, str(path))
        if after != before:
            _replace(path, after)
    finally:
        os.close(lock)


def _raw(path: Path) -> bytes:
    try:
        return read_bounded(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param=PARAM) from None


def _replace(path: Path, content: bytes) -> None:
    """Write a file anew: readable by whom it was, and never half of it, whatever fails."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:  # a disk may take a part and say so: a file object goes on, and hears why not
            with contextlib.suppress(FileNotFoundError):
                was = path.stat()
                os.fchmod(fd, was.st_mode & 0o777)
                with contextlib.suppress(PermissionError):  # only root may give a file away
                    os.fchown(fd, was.st_uid, was.st_gid)
            file.write(content)
            file.flush()
            os.fsync(fd)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}", param=PARAM) from None
