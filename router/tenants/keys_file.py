"""The file of tenants and their keys: a line each, read strictly, changed in place so that comments stay.

    # who may come in
    tenant acme priority=5 requests_per_minute=600 tokens_per_minute=100000 concurrency=16 monthly_tokens=50000000
    key acme sha256:9f86d0… created=2026-11-22
    key acme sha256:60303a… device=bench-1
    key ops sha256:fd61a0… role=operator
    cert acme sha256:2c26b4… device=bench-2
    0123456789abcdef0123 priority=5

`key` holds the digest of a key, `cert` that of a client certificate; whoever reads the file can use neither. The last
line is a key in clear, as files of earlier releases have them: it is a tenant of its own.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from router.base.credentials import key_ceilings
from router.base.errors import ConfigError
from router.tenants.tenant import NAME, NO_LIMITS, Limits, Role

PARAM = "keys_file"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MAX_BYTES = 16 * 1024 * 1024
NOBODY = "# no keys: nobody is let in"
"""What a file says that has none on purpose; any comment does."""

Kind = Literal["key", "cert"]


@dataclass(frozen=True, slots=True)
class KeyLine:
    """One credential.

    Attributes:
        digest: SHA-256 of the key as it is sent, or of the certificate in DER, in hexadecimal.
        created: a date, empty where nobody noted it.
        priority: of a key in clear.
        clear: it stands in the file as it is sent.
        number: its line in the file, counted from 1.
    """

    tenant: str
    digest: str
    kind: Kind = "key"
    device: str = ""
    role: Role = Role.CALLER
    created: str = ""
    priority: int | None = None
    clear: bool = False
    number: int = 0

    @property
    def short(self) -> str:
        """What people call it by."""
        return self.digest[:8]


@dataclass(frozen=True, slots=True)
class KeysFile:
    """What a file says.

    Attributes:
        tenants: limits by name, of those that have a line of their own.
        keys: by digest, in the order of the file.
    """

    tenants: Mapping[str, Limits] = field(default_factory=dict)
    keys: Mapping[str, KeyLine] = field(default_factory=dict)

    def limits_of(self, tenant: str) -> Limits:
        return self.tenants.get(tenant, NO_LIMITS)


def digest_of(key: bytes) -> str:
    """Return the digest of a key, of the bytes that a header carries.

    A plain hash: keys are drawn at random, so nobody can try them out, and each request is looked up by it.
    """
    return hashlib.sha256(key).hexdigest()


def read_bounded(path: Path) -> bytes:
    """Read a file, and no more of a large one than shows that it is too large for `decode`.

    Raises:
        OSError: it is missing, cannot be read, or is no regular file: a pipe would be waited for, for ever.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        return file.read(_MAX_BYTES + 1)


def is_blank(raw: bytes) -> bool:
    """Whether a file says nothing at all, no comment either: a full disk or an editor leaves such files.

    One that is to let nobody in says something: `NOBODY` is what `overspill cloud keys revoke` leaves of it.
    """
    return not raw.strip(b"\0 \t\r\n")


def decode(raw: bytes, name: str) -> KeysFile:
    """Read a file.

    Args:
        name: what to call it in errors.

    Raises:
        ConfigError: names the line and what is wrong with it; no key is ever in the message.
    """
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{name}: has more than the {_MAX_BYTES} bytes that are read", param=PARAM)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not UTF-8 text", param=PARAM) from None
    tenants: dict[str, Limits] = {}
    keys: dict[str, KeyLine] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = words_of(line)
        if not words:
            continue
        where = f"{name}:{number}"
        if words[0] == "tenant":
            tenant, limits = _tenant_line(words, where)
            if tenant in tenants:
                raise ConfigError(f"{where}: tenant `{tenant}` has a line already: leave one", param=PARAM)
            tenants[tenant] = limits
            continue
        for key in [_key_line(words, number, where)] if words[0] in {"key", "cert"} else _clear(words, number, where):
            known = keys.setdefault(key.digest, key)
            if known is not key and not (known.clear and key.clear):
                raise ConfigError(f"{where}: this {key.kind} stands in line {known.number} already", param=PARAM)
            if known is not key and (key.priority or 0) < (known.priority or 0):  # given twice: the lower ceiling
                keys[key.digest] = key
    return KeysFile(tenants, keys)


def words_of(line: str) -> list[str]:
    """Split a line; a comment is none of it."""
    return line.split("#", 1)[0].split()


def _tenant_line(words: Sequence[str], where: str) -> tuple[str, Limits]:
    name, fields = _named(words, where), _fields(words[2:], where)
    given: dict[str, Any] = dict(fields)
    if "models" in given:
        given["models"] = tuple(filter(None, given["models"].split(",")))
    try:
        return name, msgspec.convert(given, Limits, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(Limits.__struct_fields__)
        raise ConfigError(f"{where}: tenant `{name}`: {error}; known are: {known}", param=PARAM) from None


def _key_line(words: Sequence[str], number: int, where: str) -> KeyLine:
    name = _named(words, where)
    found = _DIGEST.fullmatch(words[2]) if len(words) > 2 else None
    if found is None:
        raise ConfigError(
            f"{where}: expected `{words[0]} NAME sha256:` and 64 hexadecimal digits; "
            "`overspill cloud keys add NAME` writes such lines",
            param=PARAM,
        )
    fields = _fields(words[3:], where)
    unknown = sorted(set(fields) - {"device", "role", "created"})
    device, role, created = fields.get("device", ""), fields.get("role", "caller"), fields.get("created", "")
    if unknown:
        raise ConfigError(f"{where}: `{unknown[0]}=` is unknown; known are: device, role, created", param=PARAM)
    if device and not NAME.fullmatch(device):
        raise ConfigError(f"{where}: device={device[:80]}: use up to 64 letters, digits and . _ -", param=PARAM)
    if role not in {known.value for known in Role}:
        raise ConfigError(f"{where}: role={role[:80]}: expected caller, monitor or operator", param=PARAM)
    if created and not _DATE.fullmatch(created):
        raise ConfigError(f"{where}: created={created[:80]}: expected a date such as 2026-11-22", param=PARAM)
    return KeyLine(name, found[1], "cert" if words[0] == "cert" else "key", device, Role(role), created, number=number)


def _clear(words: Sequence[str], number: int, where: str) -> list[KeyLine]:
    ceilings = key_ceilings([(where, word) for word in words], PARAM)
    return [clear_key(key, priority, number) for key, priority in ceilings.items()]


def clear_key(key: str, priority: int | None, number: int = 0) -> KeyLine:
    """Return the line of a key without a name, as configurations of earlier releases have them: it may monitor too."""
    digest = digest_of(key.encode())
    name = f"key-{digest[:8]}"
    return KeyLine(name, digest, role=Role.MONITOR, priority=priority, clear=True, number=number)


def _named(words: Sequence[str], where: str) -> str:
    if len(words) < 2 or not NAME.fullmatch(words[1]):
        raise ConfigError(
            f"{where}: expected a name after `{words[0]}`: up to 64 letters, digits and . _ -", param=PARAM
        )
    return words[1]


def _fields(words: Sequence[str], where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for place, word in enumerate(words, 1):
        name, equals, value = word.partition("=")
        if not equals or not value or name in found:  # not quoted: somebody may have put a key there
            raise ConfigError(f"{where}: word {place} from the name: expected NAME=VALUE, each once", param=PARAM)
        found[name] = value
    return found
