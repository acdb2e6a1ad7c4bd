"""The other end of the OpenAI codec: requests to an upstream, its event stream and its errors back into values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import orjson
from msgspec.structs import replace

from router.base.errors import (
    BodyShed,
    BudgetSpent,
    ContextTooLong,
    DeadlineLost,
    Evicted,
    InvalidRequest,
    ModelNotFound,
    OverspillError,
    PromiseLost,
    RateLimited,
    Refused,
    ReplicaFailed,
    ReplicasFailed,
    RequestFailed,
    Shed,
    Unavailable,
)
from router.upstream import embeddings
from router.upstream.dialect import OVERSPILL, Dialect
from router.upstream.told import Logprobs
from router.upstream.tools import message_of, tool_fields
from router.values.chunk import FinishReason, Origin
from router.values.logprobs import TokenLogprob
from router.values.prompt import ChatPrompt, TextPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.task import EmbedCall
from router.values.tool_calls import CallDelta
from router.wire import headers as wire_headers
from router.wire import load as wire_load
from router.wire import names as wire_names
from router.wire.promise import objective_headers

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

_MAX_INT32 = 2**31 - 1
_MAX_EVENT_BYTES = 4 * 1024 * 1024
_MAX_NAME_CHARS = 128
_DEFAULT = SamplingParams()


class Post(msgspec.Struct, frozen=True):
    """A request as it goes over the wire; `headers` hold printable ASCII only."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes


def encode_post(
    request: InferenceRequest,
    objective: Objective,
    model: str,
    context_tokens: int,
    dialect: Dialect = OVERSPILL,
    *,
    fields: Mapping[str, object] | None = None,
) -> Post:
    """Return what asks an upstream for `request` as a stream.

    Args:
        objective: what is left of the request's own; only a tier of ours hears of it.
        fields: of the body, over its own; one that is None is left out.

    Raises:
        InvalidRequest: it cannot be written as HTTP or JSON. No upstream has seen it, so none is to blame.
    """
    headers = [
        ("content-type", "application/json"),
        ("accept", "text/event-stream"),
        (wire_names.REQUEST_ID, request.request_id),
    ]
    if dialect.orca:
        headers.append((wire_load.FORMAT_HEADER, "JSON"))
    try:
        headers += _our_headers(request, objective) if dialect.ours else wire_headers.trace_context(request.headers)
        body = encode_request(request, model, context_tokens, dialect, fields)
    except (ValueError, TypeError, OverflowError) as error:  # JSON takes no lone surrogate, and no NaN
        raise InvalidRequest(f"the request cannot be written as JSON: {type(error).__name__}") from error
    check_headers(headers)
    return Post(path_of(request), headers, body)


def check_headers(headers: Iterable[tuple[str, str]]) -> None:
    """Refuse what no header can carry.

    Raises:
        InvalidRequest: names the header.
    """
    lines = list(headers)
    if _is_ascii_line("".join([text for line in lines for text in line])):
        return
    for name, value in lines:
        if not (_is_ascii_line(name) and _is_ascii_line(value)):
            safe = wire_names.header_safe(name[:64])
            raise InvalidRequest(f"`{safe}` cannot be passed on: it holds more than printable ASCII", param=safe)


def _our_headers(request: InferenceRequest, objective: Objective) -> list[tuple[str, str]]:
    headers = objective_headers(objective)
    headers += wire_headers.next_hop(request.headers)
    headers += wire_headers.cache_salt_headers(request.cache_owner)
    headers += wire_headers.cache_use_headers(request.cache)
    if request.attempts_left is not None:
        headers.append((wire_names.ATTEMPTS_LEFT, str(request.attempts_left)))
    return headers


def _is_ascii_line(text: str) -> bool:
    return text.isascii() and text.isprintable()


def path_of(request: InferenceRequest) -> str:
    if isinstance(request.prompt, EmbedCall):
        return embeddings.PATH
    return CHAT_PATH if isinstance(request.prompt, ChatPrompt) else COMPLETIONS_PATH


def encode_request(
    request: InferenceRequest,
    model: str,
    context_tokens: int,
    dialect: Dialect = OVERSPILL,
    fields: Mapping[str, object] | None = None,
) -> bytes:
    """Return the body that asks an upstream for `request` as a stream.

    The tokens of a continuation are taken off `max_tokens`. What a server does not know is never sent to it, and no
    request that needs it is (`Dialect.lacks`).
    """
    if isinstance(request.prompt, EmbedCall):
        return embeddings.encode_call(request.prompt, model)
    prompt = request.to_continue
    usage = {"include_usage": True}
    if dialect.running_usage:
        usage["continuous_usage_stats"] = True
    body: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": usage,
        **_sampling(request, dialect),
        **_logprobs(request, dialect),
    }
    left = tokens_left(request)
    if isinstance(prompt, ChatPrompt):
        messages = [message_of(message) for message in prompt.messages]
        body.update(tool_fields(prompt, strict=dialect.tools == "strictly"))
        if request.continuation:
            messages.append({"role": "assistant", "content": request.continuation})
            body.update(dialect.continues(request))
        body["messages"] = messages
    else:
        body["prompt"] = prompt.text if isinstance(prompt, TextPrompt) else list(prompt.token_ids)
        if request.continuation and dialect.ours:
            body["overspill_continuation"] = request.continuation
        elif isinstance(prompt, TextPrompt):
            body["prompt"] = prompt.text + request.continuation
        if left is None:  # absent would mean 16 tokens there
            left = max(1, context_tokens - request.least_prompt_tokens)
    if left is not None:
        body["max_tokens"] = left
    if fields:
        body = {name: value for name, value in {**body, **fields}.items() if value is not None}
    return orjson.dumps(body)


def tokens_left(request: InferenceRequest) -> int | None:
    """Return how many tokens the answer may still have, None if there is no bound."""
    limit = request.sampling.max_tokens
    return None if limit is None else limit - request.continuation_tokens


def _sampling(request: InferenceRequest, dialect: Dialect) -> dict[str, object]:
    """Say what differs from the defaults; servers then never see an extension that was not asked for."""
    sampling = request.sampling
    if sampling.min_tokens:
        sampling = replace(sampling, min_tokens=request.min_tokens_left)
    found: dict[str, object] = {"temperature": sampling.temperature, **(dialect.neutral or {})}
    for name, spelled in dialect.spelling.items():
        value = getattr(sampling, name)
        if value != getattr(_DEFAULT, name):
            found[spelled] = _JSON_OF.get(name, _itself)(value)
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    constraint = sampling.constraint
    return found if constraint is None else found | dialect.constraints[constraint.kind](constraint)


def _logprobs(request: InferenceRequest, dialect: Dialect) -> dict[str, object]:
    """Ask for the log probabilities of the answer, and of the prompt by having it echoed."""
    top = request.sampling.logprobs
    if top is None or not dialect.logprobs:
        return {}
    top = max(top, dialect.least_top_logprobs)
    if isinstance(request.prompt, ChatPrompt):
        return {"logprobs": True, "top_logprobs": top}
    return {"logprobs": top, "echo": True} if request.scores_prompt else {"logprobs": top}


def _itself(value: object) -> object:
    return value


_JSON_OF: Mapping[str, Callable[[Any], object]] = {
    "logit_bias": lambda biases: {str(token): bias for token, bias in biases},
    "stop_token_ids": list,
    "allowed_token_ids": list,
}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class _Usage(msgspec.Struct):
    """Of what type an upstream's figures are is not believed either: a wrong one is a missing one."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Any = None

    def told_tokens(self, most: int) -> int | None:
        """Generated tokens so far; None where the upstream tells nothing that can be true."""
        return _count(self.completion_tokens, 0, most)

    def told_prompt_tokens(self, most: int) -> int | None:
        """Tokens of the prompt; None where the upstream tells nothing that can be true."""
        return _count(self.prompt_tokens, 1, most)

    def told_cached_tokens(self, most: int) -> int | None:
        """Tokens of the prompt that were cached; None where the upstream tells nothing that can be true."""
        details = self.prompt_tokens_details
        return _count(details.get("cached_tokens"), 0, most) if isinstance(details, dict) else None


def _count(told: Any, least: int, most: int) -> int | None:
    return told if type(told) is int and least <= told <= most else None


class UpstreamError(msgspec.Struct):
    """The `error` object of a body or an event; servers fill it in unevenly."""

    message: str = ""
    code: str | int | None = None
    param: str | None = None
    attempts: Any = None

    @property
    def told_attempts(self) -> int | None:
        """Replicas that it tried; None where it tells nothing that can be true."""
        return _count(self.attempts, 1, wire_headers.MAX_ATTEMPTS)


class Event(msgspec.Struct):
    """One event of a stream. `done` is set by the end mark; `cut`: nothing after it is wanted."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: UpstreamError | str | None = None
    done: bool = False
    cut: bool = False

    @classmethod
    def of(cls, text: str, tokens: int | None, finish: FinishReason | None = None, *, cut: bool = False) -> Event:
        """Return an event of another protocol than OpenAI's; `tokens` counts those of the answer so far."""
        choice = _Choice(text=text, finish_reason=None if finish is None else finish.value)
        return cls(choices=[choice], usage=_Usage(completion_tokens=tokens), done=finish is not None, cut=cut)

    @property
    def text(self) -> str:
        if not self.choices:
            return ""
        choice = self.choices[0]
        return (choice.delta.content if choice.delta is not None else choice.text) or ""

    def logprobs(self, top: int) -> tuple[TokenLogprob, ...]:
        """What it tells of its tokens, with at most `top` alternatives each."""
        told = self.choices[0].logprobs if self.choices else None
        return () if told is None else told.values(top)

    @property
    def calls(self) -> list[CallDelta]:
        """What it adds to calls of tools."""
        delta = self.choices[0].delta if self.choices else None
        found = [] if delta is None or delta.tool_calls is None else delta.tool_calls
        functions = [(call.index, call.function) for call in found if call.function is not None]
        return [CallDelta(index, called.name or "", called.arguments or "") for index, called in functions]

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason; one that this project has no word for (`content_filter`) ends an answer like `stop`."""
        if not self.choices or self.choices[0].finish_reason is None:
            return None
        return FinishReason.LENGTH if self.choices[0].finish_reason == "length" else FinishReason.STOP

    @property
    def error_message(self) -> str | None:
        if self.error is None:
            return None
        return (self.error if isinstance(self.error, str) else self.error.message) or "no message"

    @property
    def told_attempts(self) -> int | None:
        """Replicas that the upstream tried before it gave up."""
        return self.error.told_attempts if isinstance(self.error, UpstreamError) else None


_event_decoder = msgspec.json.Decoder(Event)


class EventParser:
    """Cuts a byte stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes. What is no completion chunk becomes an event with an error."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = [event for line in lines if (event := _event(line)) is not None]
        if len(self._rest) > _MAX_EVENT_BYTES:
            events.append(Event(error=f"an event of more than {_MAX_EVENT_BYTES} bytes"))
        return events

    def end(self) -> list[Event]:
        """The end of the body says nothing: a finish reason comes before it."""
        return []


def _event(line: bytes) -> Event | None:
    if not line.startswith(b"data:"):
        return None  # blank lines, comments and other fields
    payload = line[5:].strip()
    if payload == b"[DONE]":
        return Event(done=True)
    try:
        return _event_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Event(error=f"an event that is no completion chunk: {error}")


def origin_of(headers: Mapping[str, str]) -> Origin | None:
    """Read who answers from the response headers; None if the upstream does not say."""
    variant = _name(headers.get(wire_names.MODEL, ""))
    rung = wire_headers.whole_number(headers.get(wire_names.RUNG, ""), _MAX_INT32)
    if not variant or rung is None:
        return None
    return Origin(
        tier=_name(headers.get(wire_names.TIER, "")) or "cloud",
        variant=variant,
        rung=rung,
        degraded=headers.get(wire_names.DEGRADED) == "true",
        reason=_name(headers.get(wire_names.REASON, "")),
        max_tokens=wire_headers.whole_number(headers.get(wire_names.MAX_TOKENS, ""), _MAX_INT32) or None,
    )


def _name(told: str) -> str:
    """Return a name that an upstream tells, as it may stand in our own reply headers, logs and metrics."""
    return wire_names.header_safe(told[:_MAX_NAME_CHARS])


# What a tier of ours says with its code: whether a refusal speaks for one request, or for more.
_REFUSALS: dict[tuple[int, str], type[Refused]] = {
    (kind.status, kind.code): kind for kind in (BodyShed, Evicted, PromiseLost, ReplicasFailed, DeadlineLost)
}

# Limits of this tier's own key: the upstream stays away for this tier, and its requests may well be served elsewhere.
_LIMITS = frozenset({RateLimited.code, BudgetSpent.code})


class _ErrorBody(msgspec.Struct):
    error: UpstreamError | str | None = None


# vLLM, SGLang and llama.cpp have no code for it.
_OVERFLOW = re.compile(r"maximum context length|longer than the model's context|available context size", re.IGNORECASE)


def decode_error(status: int, headers: Mapping[str, str], body: bytes, who: str) -> OverspillError:
    """Turn an upstream's refusal into the error that the router understands."""
    told = _told(body)
    error = _error_of(status, told, headers, who)
    error.attempts = told.told_attempts
    return error


def _error_of(status: int, told: UpstreamError, headers: Mapping[str, str], who: str) -> OverspillError:
    message = f"{who}: {told.message or f'HTTP {status}'}"
    if status in {401, 403}:
        return ReplicaFailed(f"{who} does not accept this tier's API key (HTTP {status}): {told.message}")
    if status in {429, 503}:
        return _refusal(status, told, headers, message)
    if status == 404 and told.code != ModelNotFound.code:
        return ReplicaFailed(f"{who}: HTTP 404, is the base URL right? {told.message}")
    if 400 <= status < 500 and status not in {408, 409, 425}:
        if told.code != ContextTooLong.code and _OVERFLOW.search(told.message or ""):
            return ContextTooLong(f"{message}; the prompt is too long", param=told.param)
        kinds = {ModelNotFound.code: ModelNotFound, ContextTooLong.code: ContextTooLong}
        return kinds.get(str(told.code), InvalidRequest)(message, param=told.param)
    return (RequestFailed if told.code == RequestFailed.code else ReplicaFailed)(message)


def _refusal(status: int, told: UpstreamError, headers: Mapping[str, str], message: str) -> Refused:
    kind = _REFUSALS.get((status, str(told.code)), Shed if status == 429 else Unavailable)
    if headers.get("x-should-retry") == "false" and str(told.code) not in _LIMITS:
        kind = DeadlineLost
    return kind(message, retry_after_s=retry_after_s(headers))


def _told(body: bytes) -> UpstreamError:
    try:
        found = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    if isinstance(found, str):
        return UpstreamError(message=found)
    return found or UpstreamError(message=body[:200].decode("utf-8", "replace").strip())


def retry_after_s(headers: Mapping[str, str], default_s: float = 1.0) -> float:
    """Read `retry-after-ms`, then `retry-after` in seconds; an HTTP date, or nothing, gives the default."""
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            value = float(headers.get(name, "nan")) / scale
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            return value
    return default_s
