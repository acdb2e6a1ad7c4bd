"""What travels between operators and devices over MQTT v5: topics, payloads and their codecs. Pure types.

Topics are `overspill/v1/{fleet}/{device}/{leaf}`. Payloads are JSON (UTF-8, at most 64 KiB):

| leaf        | from     | QoS | retained | payload                                                            |
|-------------|----------|-----|----------|--------------------------------------------------------------------|
| `desired`   | operator | 1   | yes      | `DesiredConfig`: the complete set of overrides, versioned          |
| `reported`  | device   | 1   | yes      | `Reported`: what became of it, and what is in force                |
| `status`    | device   | 1   | yes      | `Status`: `online` (birth), `offline` (last will or clean goodbye) |
| `telemetry` | device   | 0/1 | no       | `Telemetry`: a periodic snapshot                                   |
| `command`   | operator | 1   | no       | `Command`, with response topic, correlation data, message expiry   |
| `response`  | device   | 1   | no       | `Response`, with the correlation data of the command               |

What a device obeys (`desired`, `command`) is decoded strictly: unknown and duplicate keys, wrong types and non-finite
numbers are refused. What an operator reads is decoded leniently, so that an older operator understands a newer device.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from router.base.errors import ConfigError, OverspillError
from router.base.json_input import UNREADABLE
from router.base.shapes import Misfit, dotted, misfit, value_at
from router.fleetwire.strict_json import MAX_DEPTH, NotStrictJson, is_deep, parse_object

MAX_DOCUMENT_BYTES = 64 * 1024
MAX_VERSION = 2**53 - 1
"""Versions stay exact in every JSON reader."""
MAX_VERSION_JUMP = 2**32
"""A document this much above the one handled before is refused, so that no document uses up all versions at once."""
MAX_FIRST_VERSION = 2**52
"""The same for the first document of a device that remembers none."""
OVERRIDABLE: dict[str, frozenset[str] | None] = {
    "router": None,
    "models": frozenset(
        {
            "variants",
            "preload",
            "kv_slots",
            "context_tokens",
            "intra_op_threads",
            "queue_limit",
            "prefill_chunk_tokens",
            "unload_idle_s",
            "keep_kv",
        }
    ),
}
"""What a `desired` document may touch, by table: None for every key. Addresses, paths and secrets stay local."""

T = TypeVar("T")

Version = Annotated[int, msgspec.Meta(ge=1, le=MAX_VERSION)]
Whole = Annotated[int, msgspec.Meta(ge=-MAX_VERSION, le=MAX_VERSION)]
"""What devices tell: whoever reads it may compute with it, and write it."""
Utc = Annotated[dt.datetime, msgspec.Meta(tz=True)]


class DesiredConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What an operator wants of one device: every override in force, not a change to the version before.

    `router` and `models` are partial tables of the device's own configuration, laid over its file by
    `router.fleetwire.overrides.lay_over`: tables merge key by key, arrays and single values replace, and null stands
    for no override (the file's value stays). The device validates the result as a whole.

    Attributes:
        version: grows with every change; a device drops lower ones, and the same one with other content.
        issued_at: the operator's clock, with a time zone; for people, never compared.
        issued_by: free text for people.
    """

    version: Version
    issued_at: Utc
    issued_by: Annotated[str, msgspec.Meta(max_length=128)] = ""
    router: dict[str, Any] = {}
    models: dict[str, Any] = {}

    @property
    def overrides(self) -> dict[str, Any]:
        """The overrides as one tree, empty tables left out."""
        return {name: table for name in OVERRIDABLE if (table := getattr(self, name))}


class ModelReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One variant on a device.

    Attributes:
        digest: `sha256:…` of its manifest or weights.
        state: `loaded`, `on-demand`, or `failed`.
        reason: why it failed, or what else an operator should know of it.
    """

    variant: str
    digest: str = ""
    rung: Whole = 0
    state: str = "loaded"
    reason: str = ""


ReportedState = Literal["none", "applying", "applied", "applied-volatile", "partial", "refused", "stale"]
"""What a device says; a reader takes any word, for a newer device may know more.

`applied-volatile`: in force, but not on the device's disk. `partial`: after a restart only the overrides told are in
force. `stale`: a version below one that was handled before was ignored.
"""


class Reported(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a device made of `desired`.

    Attributes:
        state: a `ReportedState`, of the document that came last; `none` before the first.
        version: of that document; None if none came, or none could be read from it.
        digest: of that document as `digest_of` computes it; empty if it could not be decoded.
        reason, key: why it is not in force, or not for good; the key at fault if there is one.
        handled_version: highest version the device dealt with, which the next one has to pass; 0 before the first, -1
            from a device that does not tell.
        applied_version, applied_digest, overrides: of the document in force; empty while the file alone is in force.
        effective: the configuration in force, file and overrides together.
        privacy_held: why every request stays on the device until a document says otherwise; empty if it does not.
        birth: counter of the connection it was sent on.
    """

    state: str
    version: Whole | None = None
    digest: str = ""
    reason: str = ""
    key: str = ""
    applied_version: Whole | None = None
    applied_digest: str = ""
    handled_version: Whole = -1
    overrides: dict[str, Any] = {}
    effective: dict[str, Any] = {}
    privacy_held: str = ""
    agent_version: str = ""
    models: tuple[ModelReport, ...] = ()
    birth: Whole = 0
    reported_at: str = ""

    def __post_init__(self) -> None:
        """Refuse what those who show it could not walk through; msgspec tells where it stands."""
        if is_deep(self.overrides) or is_deep(self.effective):
            raise ValueError(f"`overrides` or `effective` is nested deeper than {MAX_DEPTH} levels")


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a device is connected.

    Attributes:
        birth: counts the device's connections. The last will carries the birth of its own connection, so an `offline`
            whose `birth` and `session` differ from the last `online` is stale and to be ignored.
        session: random for each start of the agent; tells lives apart when the counter on disk was lost.
        reason: `birth`, `will` (the connection was lost), `goodbye` (a clean shutdown).
    """

    state: Literal["online", "offline"]
    birth: Whole
    session: str
    reason: str = ""
    agent_version: str = ""
    at: str = ""


def newest_status(before: Status | None, incoming: Status) -> Status:
    """Return which of two statuses of a device holds: a last will of another connection than the newest is stale."""
    stale = (
        before is not None
        and incoming.state == "offline"
        and (incoming.session, incoming.birth) != (before.session, before.birth)
    )
    return before if before is not None and stale else incoming


class ReplicaTelemetry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load of one replica."""

    replica_id: str
    running: Whole = 0
    queued: Whole = 0
    available: bool = True


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the agent says about itself; everything it cannot measure stays empty.

    Attributes:
        load: requests in flight over slots, in [0, 1] and beyond when requests wait.
        temperature_c: hottest sensor. memory_rss_bytes, memory_available_bytes: of the agent, of the machine.
        decisions: counters since the start, by reason code. errors: what is wrong now, empty when all is well.
    """

    load: float | None = None
    replicas: tuple[ReplicaTelemetry, ...] = ()
    temperature_c: float | None = None
    memory_rss_bytes: Whole | None = None
    memory_available_bytes: Whole | None = None
    decisions: dict[str, Whole] = {}
    errors: tuple[str, ...] = ()


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot with its envelope.

    Attributes:
        key: idempotency key, unique for each sample; a redelivered sample carries the same one.
        uptime_s: on the monotonic clock, to order samples when the wall clock jumps.
        outbox_pending, outbox_dropped: rows that wait for the broker; telemetry rows dropped for room, since the start.
    """

    key: str
    at: str
    uptime_s: float
    birth: Whole
    snapshot: Snapshot
    outbox_pending: Whole = 0
    outbox_dropped: Whole = 0


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A question to a live device: `ping` or `status`."""

    command: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer; `error` is empty when all went well."""

    command: str
    error: str = ""
    birth: Whole = 0
    at: str = ""
    reported: Reported | None = None
    snapshot: Snapshot | None = None


class DesiredRefused(ConfigError):
    """A `desired` document that cannot be obeyed.

    Attributes:
        version: what it calls itself, None if that cannot be read.
    """

    code = "desired_refused"

    def __init__(self, message: str, *, version: int | None = None, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.version = version


class BadDocument(OverspillError):
    """A payload that is not what its topic promises."""

    code = "bad_document"


def encode(document: msgspec.Struct) -> bytes:
    """Return the JSON of a payload."""
    return msgspec.json.encode(document)


def decode_desired(payload: bytes) -> DesiredConfig:
    """Decode strictly.

    Raises:
        DesiredRefused: too long, no JSON, a key unknown or double, a value of the wrong type.
    """
    tree = _parse(payload)
    version = tree.get("version")
    known = version if isinstance(version, int) and not isinstance(version, bool) else None
    for key in tree:
        if key not in DesiredConfig.__struct_fields__:
            allowed = ", ".join(DesiredConfig.__struct_fields__)
            raise DesiredRefused(f"desired: unknown key `{key}`; known keys: {allowed}", version=known, param=key)
    try:
        desired = msgspec.convert(tree, DesiredConfig, strict=True)
        check_overridable(desired.overrides, known)
    except msgspec.ValidationError as error:
        found = misfit(tree, DesiredConfig) or Misfit((), str(error))
        key = dotted(found.key)
        shown = f": `{key}` = {_short(value_at(tree, found.key))}: " if key else ": "
        raise DesiredRefused(f"desired{shown}{found.what}", version=known, param=key or None) from error
    return desired


def check_overridable(overrides: Mapping[str, Any], version: int | None = None) -> None:
    """Refuse what may not be set from afar, whoever asks.

    Raises:
        DesiredRefused: a table or a key outside `OVERRIDABLE`; names those that may be set.
    """
    for table, values in overrides.items():
        if table not in OVERRIDABLE:
            known = ", ".join(OVERRIDABLE)
            raise DesiredRefused(
                f"`{table}` cannot be set over the fleet; tables: {known}", version=version, param=table
            )
        allowed = OVERRIDABLE[table]
        if not isinstance(values, Mapping) or allowed is None:
            continue
        for key in values:
            if key not in allowed:
                name, keys = f"{table}.{key}", ", ".join(sorted(allowed))
                raise DesiredRefused(
                    f"`{name}` cannot be set over the fleet; keys: {keys}", version=version, param=name
                )


def decode_command(payload: bytes) -> Command:
    """Decode strictly.

    Raises:
        BadDocument: it is no command.
    """
    try:
        return msgspec.convert(_parse(payload), Command, strict=True)
    except (msgspec.ValidationError, DesiredRefused) as error:
        raise BadDocument(f"command: {error}") from error


def decode_as(payload: bytes, shape: type[T]) -> T:
    """Decode leniently: unknown keys are skipped.

    Raises:
        BadDocument: too long, no JSON, or a value of the wrong type.
    """
    if len(payload) > 4 * MAX_DOCUMENT_BYTES:
        raise BadDocument(f"{shape.__name__}: {len(payload)} bytes, over the limit of {4 * MAX_DOCUMENT_BYTES}")
    try:
        return msgspec.json.decode(payload, type=shape)
    except UNREADABLE as error:
        raise BadDocument(f"{shape.__name__}: {error}") from error


def digest_of(desired: DesiredConfig) -> str:
    """Return `sha256:…` over the canonical JSON (sorted keys, no blanks) of a document."""
    text = json.dumps(msgspec.to_builtins(desired), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()


def _parse(payload: bytes) -> dict[str, Any]:
    if len(payload) > MAX_DOCUMENT_BYTES:
        raise DesiredRefused(f"the document has {len(payload)} bytes; at most {MAX_DOCUMENT_BYTES} are accepted")
    try:
        return parse_object(payload)
    except NotStrictJson as error:
        raise DesiredRefused(error.message, param=error.param) from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def utc_now() -> str:
    """Return the wall clock for people: RFC 3339, UTC, milliseconds."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
