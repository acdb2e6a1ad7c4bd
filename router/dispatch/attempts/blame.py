"""Decides whose fault an error is that ended an attempt; nothing else does.

| verdict         | errors                                         | breaker          | cools down  | this request |
|-----------------|------------------------------------------------|------------------|-------------|--------------|
| `REQUEST`       | `InvalidRequest`: HTTP 4xx but those below; it | -                | -           | to another   |
|                 | cannot be written as HTTP or JSON              |                  |             | kind of      |
|                 |                                                |                  |             | server, else |
|                 |                                                |                  |             | fails        |
| `REFUSED_ONE`   | `RefusedAlone`: deadline, TTFT or TPOT lost,   | -                | -           | elsewhere,   |
|                 | all replicas there failed for it;              |                  |             | else refused |
|                 | `BodyShed`: no room for one so large;          |                  |             |              |
|                 | `RequestFailed`: the replica says it goes on   |                  |             |              |
| `REFUSED_CLASS` | `Shed`: HTTP 429, queue full, evicted, quota   | -                | its         | waits, or    |
|                 |                                                |                  | priority    | elsewhere    |
|                 |                                                |                  | and below   |              |
| `REFUSED_ALL`   | other `Refused`: HTTP 503, no capacity,        | -                | all         | waits, or    |
|                 | starting, draining                             |                  |             | elsewhere    |
| `DOWN`          | `ReplicaUnreachable`: no connection, its       | counts once      | -           | elsewhere    |
|                 | process is gone; silence to a time limit       | a request        |             |              |
| `LINK`          | `LinkLost`: this machine left the network that | -                | -           | anywhere,    |
|                 | the request went by                            |                  |             | there too    |
| `FAILED`        | all else, unknown exceptions too: HTTP 401,    | counts once      | -           | elsewhere    |
|                 | 403, 408, 5xx, garbage, crash, broken off      | a prompt         |             |              |

None of them opens a breaker by itself: a request may be what a replica fails on, falls silent on or dies of. What
counts makes an endpoint suspected, and a self-test tells (`router.dispatch.probes.self_test`). An answer with an error
or a crash counts once for each prompt, so that a prompt that some replica always fails on, retried for ever, asks for
no self-test. A key that the upstream refuses (401, 403) is the tier's configuration, but a filter in front of an
upstream answers 403 to single prompts too; a self-test meets a wrong key as well and says so.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

from router.base.errors import (
    BodyShed,
    InvalidRequest,
    LinkLost,
    Refused,
    RefusedAlone,
    ReplicaFailed,
    ReplicaUnreachable,
    RequestFailed,
    Shed,
)
from router.values.prompt import Input
from router.values.request import InferenceRequest, Outcome
from router.values.task import PassedCall


class Verdict(enum.Enum):
    """Whose fault an error is; see the table above."""

    REQUEST = "request"
    REFUSED_ONE = "refused_one"
    REFUSED_CLASS = "refused_class"
    REFUSED_ALL = "refused_all"
    DOWN = "down"
    LINK = "link"
    FAILED = "failed"

    @property
    def cools(self) -> bool:
        """The replica is to be asked again later, by this request too."""
        return self in {Verdict.REFUSED_CLASS, Verdict.REFUSED_ALL}

    @property
    def excludes(self) -> bool:
        """The replica may not serve this request again."""
        return not self.cools and self is not Verdict.LINK

    @property
    def counts(self) -> bool:
        """The breaker hears of it."""
        return self in {Verdict.DOWN, Verdict.FAILED}


_VERDICTS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], Verdict], ...] = (
    (InvalidRequest, Verdict.REQUEST),
    ((RefusedAlone, RequestFailed, BodyShed), Verdict.REFUSED_ONE),
    (Shed, Verdict.REFUSED_CLASS),
    (Refused, Verdict.REFUSED_ALL),
    (LinkLost, Verdict.LINK),
    (ReplicaFailed, Verdict.FAILED),
    (ReplicaUnreachable, Verdict.DOWN),
)
"""The first that fits."""


def verdict(error: BaseException) -> Verdict:
    """Say whose fault `error` is, which ended an attempt on a replica."""
    return next((found for kinds, found in _VERDICTS if isinstance(error, kinds)), Verdict.FAILED)


def source_of(request: InferenceRequest, found: Verdict) -> str:
    """Return what a failure counts under: the request itself where it is surely the replica's, else its prompt.

    A breaker counts each source once.
    """
    if found is Verdict.DOWN:
        return f"request {request.request_id} {request.accepted_at_s!r}"
    asked = request.prompt
    prompt = b"%b %b" % (asked.path.encode(), asked.after) if isinstance(asked, PassedCall) else _written(asked)
    return f"prompt {hashlib.blake2b(prompt, digest_size=16).hexdigest()}"


def _written(asked: Input) -> bytes:
    """Return a prompt as bytes, those of images and tensors as they are: spelt out they would hold up everybody."""
    kind = type(asked).__name__.encode()
    try:
        return kind + msgspec.msgpack.encode(asked)
    except UnicodeEncodeError:  # half a surrogate pair
        return kind + repr(asked).encode("utf-8", "backslashreplace")


def outcome_of(error: BaseException) -> Outcome:
    """Return how a request ended that got `error` for an answer."""
    if isinstance(error, InvalidRequest):
        return Outcome.INVALID
    if isinstance(error, Shed):
        return Outcome.EVICTED if error.code == "evicted" else Outcome.SHED
    return Outcome.UNAVAILABLE if isinstance(error, Refused) else Outcome.FAILED
