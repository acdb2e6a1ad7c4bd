"""The names of our headers, and what is nearly one: a promise under a mistyped name is refused and never dropped.

A lost `local-only` would send out what must stay. Headers, fields and parameters of everybody else pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from urllib.parse import parse_qsl

import msgspec

from router.base.errors import HeadersTooLarge, InvalidRequest
from router.base.json_input import UNREADABLE

REQUEST_ID = "x-request-id"
DEADLINE = "x-overspill-deadline-ms"
TTFT = "x-overspill-ttft-slo-ms"
TPOT = "x-overspill-tpot-slo-ms"
LATE_VALUE = "x-overspill-late-value"
SHORTEN = "x-overspill-shorten"
DEFER = "x-overspill-defer"
PRIORITY = "x-overspill-priority"
LOCALITY = "x-overspill-locality"
MIN_QUALITY = "x-overspill-min-quality"
SESSION = "x-overspill-session"
HOPS = "x-overspill-hops"
INSTANCE = "x-overspill-instance"
DEMAND = "x-overspill-demand"
ATTEMPTS_LEFT = "x-overspill-attempts-left"
CACHE_SALT = "x-overspill-cache-salt"
CACHE = "x-overspill-cache"

TIER = "x-overspill-tier"
MODEL = "x-overspill-model"
RUNG = "x-overspill-rung"
REASON = "x-overspill-reason"
DEGRADED = "x-overspill-degraded"
PREDICTED_TTFT = "x-overspill-predicted-ttft-ms"
MAX_TOKENS = "x-overspill-max-tokens"
REACH = "x-overspill-reach"

REPLY_NAMES = (TIER, MODEL, RUNG, REASON, DEGRADED, PREDICTED_TTFT, MAX_TOKENS)

PREFIX = "x-overspill-"
REQUEST_NAMES = (
    TTFT,
    TPOT,
    DEADLINE,
    LATE_VALUE,
    SHORTEN,
    DEFER,
    PRIORITY,
    LOCALITY,
    MIN_QUALITY,
    SESSION,
    HOPS,
    ATTEMPTS_LEFT,
    INSTANCE,
    DEMAND,
    CACHE_SALT,
    CACHE,
)

# Names other routers use for the same promise; the first one present wins.
TTFT_NAMES = (TTFT, "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_NAMES = (TPOT, "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")

MAX_FIELDS = 256
"""Headers, parameters or fields of one request: each name that is not ours is compared with those that are."""

_OWN = "overspill"
_NEAR = 0.85  # of difflib's ratio: one letter in six, two in sixteen
_HINT = 0.5
_MAX_NAME_CHARS = 80


def _letters(name: str) -> str:
    """Leave out what spellings differ in: case, `-`, `_`, blanks."""
    return "".join(c for c in name.lower() if c.isalnum())


_HEADERS = {_letters(name).removeprefix("x"): name for name in {*REQUEST_NAMES, *TTFT_NAMES, *TPOT_NAMES}}
_SUFFIXES = {name.removeprefix(PREFIX): name for name in REQUEST_NAMES}
# Without our prefix, as fields of a body or a query. `session`, `hops`, `shorten` and the like are everybody's words,
# and promise nothing.
_PROMISES = (DEADLINE, LATE_VALUE, TTFT, TPOT, PRIORITY, LOCALITY, MIN_QUALITY)
_FIELDS = {_letters(n.removeprefix(PREFIX)): n for n in _PROMISES}
_FIELDS |= {_letters(n.removeprefix("x-")): n for n in (*TTFT_NAMES, *TPOT_NAMES)}
_LOCALITIES = {"localonly", "cloudonly"}


@lru_cache(maxsize=4096)
def _header_meant(name: str) -> str | None:
    """Return the header that `name` resembles: `x-overspill-` if only the prefix says so, None if it is not ours."""
    plain = name.lower().replace("_", "-").strip("- .")
    first, _, rest = plain.removeprefix("x-").partition("-")
    if first == _OWN and not rest:  # `x-overspill: local-only`
        return PREFIX
    if rest and _is_own(first):
        close = difflib.get_close_matches(rest, _SUFFIXES, n=1, cutoff=_HINT)
        return _SUFFIXES[close[0]] if close else PREFIX
    letters = _letters(plain).removeprefix("x")
    close = difflib.get_close_matches(letters, _HEADERS, n=1, cutoff=_NEAR)
    if not close or (close[0].startswith(_OWN) and not _is_own(letters[: len(_OWN) - len(close[0])])):
        return None  # `x-override-priority` ends like ours
    return _HEADERS[close[0]]


def _is_own(word: str) -> bool:
    return word == _OWN or difflib.SequenceMatcher(None, word, _OWN).ratio() >= _NEAR


@lru_cache(maxsize=4096)
def _field_meant(name: str) -> str | None:
    letters = _letters(name)
    if letters in _LOCALITIES:  # `local_only: true`
        return LOCALITY
    if letters.removeprefix("x") == _OWN:  # `overspill: {"locality": …}`
        return PREFIX
    close = difflib.get_close_matches(letters, _FIELDS, n=1, cutoff=_NEAR)
    return _FIELDS[close[0]] if close else _header_meant(name)


def _says_where(name: str, value: str) -> bool:
    """Whether it is a locality under whatever name: `data_locality=local-only`."""
    return _ends_in_locality(name[-_MAX_NAME_CHARS:]) and _letters(value[:_MAX_NAME_CHARS]) in _LOCALITIES


@lru_cache(maxsize=4096)
def _ends_in_locality(name: str) -> bool:
    return _letters(name).endswith("locality")


def _ends(name: str) -> str:
    """Keep of a long name what is looked at: no cache holds what a caller makes up."""
    return name[:_MAX_NAME_CHARS] + name[-_MAX_NAME_CHARS:]


@lru_cache(maxsize=4096)
def _suspicious(name: str) -> bool:
    """Whether a header needs a closer look: hardly any does, and their names are few."""
    return _header_meant(name[:_MAX_NAME_CHARS]) is not None or _ends_in_locality(name[-_MAX_NAME_CHARS:])


def refuse_headers(names: Mapping[str, str], served: Iterable[str]) -> None:
    """Refuse headers that are nearly ours.

    Args:
        names: lower-case name → value.
        served: names that are ours, or let through.

    Raises:
        InvalidRequest: naming the header, and the one that was meant.
    """
    if len(names) > MAX_FIELDS:
        raise HeadersTooLarge(f"{len(names)} request headers, at most {MAX_FIELDS} are read")
    for name, value in names.items():
        if name in served or not _suspicious(name if len(name) <= 2 * _MAX_NAME_CHARS else _ends(name)):
            continue
        meant = LOCALITY if _says_where(name, value) else _header_meant(name[:_MAX_NAME_CHARS])
        if meant is not None:
            shown = header_safe(name[:_MAX_NAME_CHARS])
            hint = f"; did you mean `{meant}`?" if meant != PREFIX else ""
            raise InvalidRequest(
                f"`{shown}` is no request header of Overspill, these are: {', '.join(REQUEST_NAMES)}{hint}",
                param=shown,
            )


def refuse_query(query: bytes) -> None:
    """Refuse a query that names a promise: promises are read from headers.

    Raises:
        InvalidRequest: naming the parameter and the header to send.
    """
    if not query:
        return
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise InvalidRequest(f"the query has more than {MAX_FIELDS} parameters") from None
    for name, value in pairs:
        _refuse_field(name, value, "the query parameter ")


class _Field:
    """The name of one field: equal to no other, so that a repeated field is read as often as it stands there."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_names_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
# SDKs merge these into the request; on the wire they are read by nobody, whatever they promise.
_CARRIERS = frozenset({"extra_body", "extra_headers", "headers"})
_MAX_DEPTH = 4
_LONG_BYTES = 64 * 1024  # from here on a body may have so many names that to read them all would keep everybody waiting


def refuse_fields(body: bytes, known: frozenset[str]) -> None:
    """Refuse a JSON object, decoded before, whose fields nobody reads name a promise; so do `extra_body` and the like.

    Args:
        known: fields that are read.

    Raises:
        InvalidRequest: naming the field and the header to send.
    """
    checked_field_names(body, known)


def checked_field_names(body: bytes, known: frozenset[str]) -> AbstractSet[str]:
    """Return the names of the fields of a JSON object; where they cannot be told, all that it may have.

    Raises:
        InvalidRequest: as `refuse_fields`.
    """
    try:
        if len(body) < _LONG_BYTES:
            names: AbstractSet[str] = _names_decoder.decode(body).keys()
        else:
            names = {field.name for field in _fields_in(body)}
    except UNREADABLE:
        return known
    if not (names <= known and names.isdisjoint(_CARRIERS)):  # hardly ever: then each is looked at, repeated ones too
        _refuse_fields_at("", body, known)
    return names


def _fields_in(body: bytes) -> dict[_Field, msgspec.Raw]:
    """Return the fields of a JSON object, repeated ones too, and look no further where there are too many."""
    found: list[_Field] = []

    def field(_: type, name: str) -> _Field:
        if len(found) == MAX_FIELDS:
            raise InvalidRequest(f"the body has more than the {MAX_FIELDS} fields that are read")
        found.append(_Field(name))
        return found[-1]

    return msgspec.json.decode(body, type=dict[_Field, msgspec.Raw], dec_hook=field)


def _refuse_fields_at(at: str, body: bytes, known: frozenset[str]) -> None:
    try:
        found = _fields_in(body)
    except UNREADABLE:
        return
    for field, raw in found.items():
        if field.name not in known:
            value = bytes(raw) if len(bytes(raw)) <= _MAX_NAME_CHARS else b""
            _refuse_field(field.name, value.decode("utf-8", "replace"), "", at)
        if field.name in _CARRIERS and at.count(".") < _MAX_DEPTH:
            _refuse_fields_at(f"{at}{field.name}.", bytes(raw), frozenset())


def refuse_names(names: Iterable[str], at: str) -> None:
    """Refuse the names of parameters that nobody reads, if they name a promise.

    Args:
        at: where they stand, for the error.

    Raises:
        InvalidRequest: naming the parameter and the header to send.
    """
    for name in names:
        _refuse_field(name, "", "", f"{at}.")


def _refuse_field(name: str, value: str, kind: str, at: str = "") -> None:
    meant = LOCALITY if _says_where(name, value) else _field_meant(name[:_MAX_NAME_CHARS])
    if meant is not None:
        where = f"{at}{header_safe(name[:_MAX_NAME_CHARS])}"
        remedy = f"send the header `{meant}`" if meant != PREFIX else f"headers are: {', '.join(REQUEST_NAMES)}"
        raise InvalidRequest(f"{kind}`{where}` is not read here: {remedy} instead", param=where)


def header_safe(text: str) -> str:
    """Replace what may not stand in a header value by `?`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if " " <= c <= "~" else "?" for c in text)
