"""When what a PEM file holds ends: certificates, and lists of revoked ones (RFC 5280, section 4.1 and 5.1)."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Final

_PART: Final = re.compile(rb"-----BEGIN (CERTIFICATE|X509 CERTIFICATE|X509 CRL)-----\s(.+?)-----END", re.DOTALL)
# DER tags.
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_INTEGER: Final = 0x02
_EXPLICIT_VERSION: Final = 0xA0


def first_end_s(pem: bytes) -> float:
    """Return when the first of the certificates and lists in a file ends, in Unix time; infinity where none does.

    Raises:
        ValueError: the file is damaged.
    """
    ends_s = float("inf")
    try:
        for part in _PART.finditer(pem):
            end = _list_end if part[1].endswith(b"CRL") else _certificate_end
            _, signed = next(_parts(base64.b64decode(part[2])))
            _, told = next(_parts(signed))
            ends_s = min(ends_s, end(list(_parts(told))))
    except (IndexError, StopIteration) as error:
        raise ValueError("a certificate, or a list of revoked ones, is damaged") from error
    return ends_s


def _certificate_end(parts: list[tuple[int, bytes]]) -> float:
    """[version], serial, algorithm, issuer, validity: from and until."""
    validity = parts[4 if parts[0][0] == _EXPLICIT_VERSION else 3][1]
    _, until = _parts(validity)
    return _unix_s(*until)


def _list_end(parts: list[tuple[int, bytes]]) -> float:
    """[version], algorithm, issuer, this update, and the next one, which may be left out."""
    tag, value = parts[4 if parts[0][0] == _INTEGER else 3]
    return _unix_s(tag, value) if tag in {_UTC_TIME, _GENERALIZED_TIME} else float("inf")


def _parts(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of the values that lie behind each other."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size >= 0x80:  # the length itself is so many bytes
            size, at = int.from_bytes(der[at : at + size - 0x80], "big"), at + size - 0x80
        if at + size > len(der):
            raise IndexError
        yield tag, der[at : at + size]
        at += size


def _unix_s(tag: int, value: bytes) -> float:
    text = value.decode("ascii")
    if tag == _UTC_TIME:  # of two digits: 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()
