"""Every error Overspill raises on purpose, as one tree.

The class carries what a caller needs to react: the HTTP status, whether a retry can help, and a machine-readable
code. The message names the thing, the value seen and the remedy.

    OverspillError
    ├── ConfigError                 a configuration file, variable or flag is wrong (never reaches HTTP)
    ├── InvalidRequest        400   the caller must change the request
    │   ├── ModelNotFound     404
    │   ├── ContextTooLong    400   the prompt fits no window of any candidate
    │   ├── NoTokenizer       400   this tier does not have that of the model
    │   ├── InputsTooLarge    413   its inputs, or the answer to them, take more memory than one request may
    │   └── HeadersTooLarge   431   more request headers than are read
    ├── Unauthenticated       401
    ├── Forbidden             403   the key is known, and this is none of its business
    ├── Refused                     healthy, but not now: always says when to come back
    │   ├── Shed              429   a quota or class queue is full
    │   │   ├── RateLimited   429   a limit of its tenant: requests, tokens, concurrency, retries
    │   │   ├── BudgetSpent   429   its tenant has used up the month's tokens
    │   │   ├── BodyShed      429   bodies of others leave no room for one as large as this
    │   │   └── Evicted       429   pushed out of a full queue by a request of higher priority
    │   └── Unavailable       503   no capacity
    │       └── RefusedAlone  503   for what this request asks or met; speaks for no other request
    │           ├── PromiseLost     its TTFT or TPOT cannot be kept now
    │           ├── ReplicasFailed  every replica that may serve it has failed for it
    │           └── DeadlineLost    its deadline can no longer be kept; a retry cannot help
    ├── ReplicaError          502   a replica broke; dispatch may continue elsewhere
    │   ├── ReplicaUnreachable      nothing was generated: safe to send again
    │   │   └── ReplicaFailed       it was reached: it answered with an error, fell silent or crashed
    │   ├── ReplicaCrashed    500   its own code failed, perhaps on what the request holds: one other may try
    │   ├── ReplicaBroken           the stream ended early: continue from the text emitted so far
    │   └── RequestFailed     500   this request alone failed in a replica that goes on with the others
    └── ArtifactError         500   a model file is missing, damaged or of the wrong kind
        └── ArtifactMissing         it was never made or pulled here
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What went wrong may be megabytes long, and is quoted in replies, logs and decision records.
_MAX_MESSAGE_CHARS = 4000
_MAX_PARAM_CHARS = 200


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def in_words(error: BaseException) -> str:
    """Return the type of an exception and what it says; the type alone where it says nothing."""
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001 - an exception of whoever wrote a stage; nobody shall fail of telling about it
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class OverspillError(Exception):
    """Base of the tree.

    Attributes:
        status: HTTP status the gateway answers with.
        code: stable machine-readable string, the `code` of an OpenAI-shaped error.
        kind: the `type` of an OpenAI-shaped error.
        param: the request field or configuration key at fault, if there is one.
        attempts: replicas that a request was tried on before this became its end, in this tier and those behind it;
            None where nobody counted.
    """

    status: int = 500
    code: str = "internal_error"
    kind: str = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.message = _clipped(message, _MAX_MESSAGE_CHARS)
        self.param = param if param is None else _clipped(param, _MAX_PARAM_CHARS)
        self.attempts: int | None = None
        super().__init__(self.message)


class ConfigError(OverspillError):
    """A configuration value is wrong; the message names the key, the value, the line and the remedy.

    Attributes:
        placed: the message says where the key was set: a line of a file, a variable or a flag.
    """

    code = "invalid_config"
    placed: bool = False


class InvalidRequest(OverspillError):
    """The caller must change the request before sending it again."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class ModelNotFound(InvalidRequest):
    """No replica of this tier or its upstream serves the named model."""

    status = 404
    code = "model_not_found"

    @classmethod
    def of(cls, model: str, known: Iterable[str], patterns: Iterable[str] = ()) -> ModelNotFound:
        """Return the error for a model that is not among `known`, the names that may be asked for.

        Args:
            patterns: of the names that the caller's tenant may use, where not all are.
        """
        names, allowed = sorted(known), ", ".join(f"`{pattern}`" for pattern in patterns)
        if allowed and not names:
            return cls(
                f"`model`: `{model}` is not served to this key: its tenant may use {allowed}, and no such model is "
                "served here",
                param="model",
            )
        close = difflib.get_close_matches(model, names, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        served = ", ".join(names) or "none yet"
        return cls(f"`model`: `{model}` is not served here, these are: {served}{hint}", param="model")


class NoTokenizer(InvalidRequest):
    """The tokenizer of a model is not on this tier; a server behind it may have it."""


class ContextTooLong(InvalidRequest):
    """Prompt and requested answer fit the context window of no candidate."""

    code = "context_length_exceeded"

    @classmethod
    def of(cls, window_tokens: int, what: str, *, param: str | None = None) -> ContextTooLong:
        """Return the error for a prompt that does not fit `window_tokens`.

        It begins as OpenAI's own does and ends as Anthropic's: LiteLLM knows an overflow by the first words alone,
        LangChain by the last.

        Args:
            what: how long the prompt is, and of whom the window is.
        """
        return cls(
            f"This model's maximum context length is {window_tokens} tokens, prompt and answer together: {what}; "
            "the prompt is too long: shorten it",
            param=param,
        )


class InputsTooLarge(InvalidRequest):
    """The inputs of the request, or the answer to them, take more memory than one request may."""

    status = 413
    code = "inputs_too_large"


class HeadersTooLarge(InvalidRequest):
    """The request has more headers than are read."""

    status = 431
    code = "headers_too_large"


class Unauthenticated(OverspillError):
    """The API key is missing or unknown."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class Forbidden(OverspillError):
    """The key is known, and does not open this."""

    status = 403
    code = "insufficient_permissions"
    kind = "permission_error"


class Refused(OverspillError):
    """The tier is healthy but will not serve this request now.

    Attributes:
        retry_after_s: seconds after which a retry has a fair chance; sent as `retry-after` and `retry-after-ms`.
        should_retry: sent as `x-should-retry: false` when no retry can help.
    """

    should_retry: bool = True

    def __init__(self, message: str, *, retry_after_s: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class Shed(Refused):
    """A quota or a class queue is full."""

    status = 429
    code = "shed"
    kind = "overloaded_error"


class RateLimited(Shed):
    """A limit of the tenant is reached: others are served meanwhile. `code` and `type` are those of OpenAI's API.

    Args:
        what: the limit, in a word: `requests`, `tokens`, …
        hopeless: however long it waits.
    """

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, what: str, hopeless: bool = False) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.kind = what
        self.should_retry = not hopeless


class BudgetSpent(Shed):
    """The tenant has used up its tokens of the month; `code` and `type` are those of OpenAI's API."""

    code = "insufficient_quota"
    kind = "insufficient_quota"
    should_retry = False


class BodyShed(Shed):
    """Bodies of others leave no room for one as large as this: smaller ones may well find room."""

    code = "body_shed"


class Evicted(Shed):
    """Pushed out of a full queue by a request of higher priority."""

    code = "evicted"


class Unavailable(Refused):
    """No candidate has capacity, or none is healthy."""

    status = 503
    code = "unavailable"
    kind = "unavailable_error"


class RefusedAlone(Unavailable):
    """Refused for what this one request asks or met: others may well be served, so nobody else is kept away."""


class PromiseLost(RefusedAlone):
    """No candidate can keep the TTFT or TPOT that the caller asked for, as busy as they are now."""

    code = "promise_lost"


class ReplicasFailed(RefusedAlone):
    """Every replica that may serve this request has failed for it."""

    code = "replicas_failed"


class DeadlineLost(RefusedAlone):
    """The deadline has passed or cannot be met by any candidate, however soon it is retried."""

    code = "deadline_lost"
    should_retry = False


class ReplicaError(OverspillError):
    """A replica failed while serving a request."""

    status = 502
    code = "replica_error"


class ReplicaUnreachable(ReplicaError):
    """The replica generated nothing: it is safe to send the request elsewhere."""

    code = "replica_unreachable"


class ReplicaFailed(ReplicaUnreachable):
    """The replica was reached and generated nothing: an error of its own, silence, or a crash.

    The request may be what it fails on: this counts once for each prompt (`router.dispatch.attempts.blame`).
    """

    code = "replica_failed"


class ReplicaCrashed(ReplicaError):
    """The replica's own code failed. The request may hold what it fails on, so only one other replica tries it."""

    status = 500
    code = "replica_crashed"


class ReplicaBroken(ReplicaError):
    """The stream ended before its finish reason; what was emitted so far stands."""

    code = "replica_broken"


class LinkLost(ReplicaError):
    """This machine has left the network by which a request went: nothing is known of the replica.

    What was emitted so far stands; the same replica may go on with it, over another connection.
    """

    code = "link_lost"


class RequestFailed(ReplicaError):
    """One request failed in a replica that goes on with the others: it says nothing about the replica's health."""

    status = 500
    code = "request_failed"


class ArtifactError(OverspillError):
    """A model file is missing, damaged, or of a kind this runtime cannot load."""

    code = "artifact_error"


class ArtifactMissing(ArtifactError):
    """The store holds nothing of it: it was never made, or never pulled."""
