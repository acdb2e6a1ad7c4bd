"""Files, batches and their lines, as the store keeps them. Frozen; times are Unix seconds."""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass

BATCH_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


class BatchStatus(str, enum.Enum):
    """Where a batch is, in the words of the OpenAI API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class LineKind(str, enum.Enum):
    """Into which file the answer of a line goes."""

    OUTPUT = "output"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of one caller.

    Attributes:
        owner: whose it is, as `router.gateway.deps.Caller` tells; nobody else sees it.
        bytes: its length.
        expires_s: when it is deleted; None: not by itself.
    """

    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_s: int
    expires_s: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch.

    Attributes:
        window: as it was asked for, e.g. `24h`; expires_s: when it ends.
        total, completed, failed: lines; the latter two are those that were answered.
        labels: the caller's metadata, as JSON.
        headers: of ours that hold for each line, as JSON pairs.
        errors: why it failed, as JSON; empty otherwise.
        keep_output_s: how long its output may be kept; None takes the tier's.
    """

    id: str
    owner: str
    status: BatchStatus
    endpoint: str
    input_file_id: str
    window: str
    created_s: int
    expires_s: int
    labels: str = "{}"
    headers: str = "[]"
    errors: str = ""
    keep_output_s: int | None = None
    in_progress_s: int | None = None
    finalizing_s: int | None = None
    completed_s: int | None = None
    failed_s: int | None = None
    expired_s: int | None = None
    cancelling_s: int | None = None
    cancelled_s: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def answered(self) -> int:
        return self.completed + self.failed


@dataclass(frozen=True, slots=True)
class Asking:
    """A request as it may be kept.

    Attributes:
        asked: tells one asking from another, None where its client gave it no id.
        headers: lower-case names of ours that hold for it.
    """

    asked: str | None
    path: str
    request_id: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class DeferredStatus(str, enum.Enum):
    """Where a deferred request is."""

    QUEUED = "queued"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Deferred:
    """A request that could not be served when it came.

    Attributes:
        asked: tells one asking from another, None where its client gave it no id.
        headers: of ours that hold for it, as JSON pairs.
        why: it was deferred: code and message, as JSON.
        expires_s: when it is given up, or its answer forgotten.
        tries: how often it failed for reasons that may pass.
        status_code, answer: the reply, once there is one.
    """

    id: str
    owner: str
    asked: str | None
    status: DeferredStatus
    path: str
    request_id: str
    headers: str
    body: bytes
    why: str
    created_s: int
    expires_s: int
    ended_s: int | None = None
    tries: int = 0
    status_code: int | None = None
    answer: bytes | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something for the webhook; its id stays the same however often it is sent.

    Attributes:
        due_s: when it is sent next.
    """

    id: str
    created_s: int
    body: bytes
    tries: int = 0
    due_s: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch.

    Attributes:
        number: of its line in the input file, from 1.
        at, size: where its bytes are in the file.
        tries: how often it failed for reasons that may pass.
    """

    batch_id: str
    number: int
    custom_id: str
    at: int
    size: int
    tries: int = 0


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What became of a line: a line of the output file or of the error file."""

    batch_id: str
    number: int
    kind: LineKind
    text: bytes


def new_id(prefix: str, now_s: float) -> str:
    """Return an id that nobody guesses; ids sort by the time of their making."""
    return f"{prefix}{int(now_s * 1000):012x}{secrets.token_hex(10)}"
