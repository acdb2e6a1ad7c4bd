"""The other end of the OpenAI codec: requests to an upstream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import orjson
from msgspec.structs import replace

from router.base.errors import InvalidRequest
from router.upstream.codec import embeddings, pipelines
from router.upstream.codec.dialect import OVERSPILL, Dialect
from router.upstream.codec.refusals import COMPLETIONS_PATH
from router.upstream.codec.tools import message_of, tool_fields
from router.values.prompt import ChatPrompt, TextPrompt
from router.values.request import InferenceRequest, Objective
from router.values.task import Call, EmbedCall, PassedCall, TensorCall
from router.wire import headers as wire_headers
from router.wire import load as wire_load
from router.wire import names as wire_names
from router.wire.openai import passed
from router.wire.promise import objective_headers

CHAT_PATH = "/v1/chat/completions"


class HttpRequest(msgspec.Struct, frozen=True):
    """A request as it goes over the wire; `headers` hold printable ASCII only."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes
    method: str = "POST"


def encode_http(
    request: InferenceRequest,
    objective: Objective,
    model: str,
    context_tokens: int,
    dialect: Dialect = OVERSPILL,
    *,
    fields: Mapping[str, object] | None = None,
) -> HttpRequest:
    """Return what asks an upstream for `request` as a stream.

    Args:
        objective: what is left of the request's own; only a tier of ours hears of it.
        fields: of the body, over its own; one that is None is left out.

    Raises:
        InvalidRequest: it cannot be written as HTTP or JSON. No upstream has seen it, so none is to blame.
    """
    prompt = request.prompt
    call = prompt if isinstance(prompt, PassedCall) else None
    headers = [
        ("accept", "text/event-stream" if call is None else "*/*"),
        (wire_names.REQUEST_ID, request.request_id),
    ]
    method = "POST" if call is None else call.method
    if method == "POST":
        headers.append(("content-type", "application/json" if call is None else call.media_type))
    if dialect.orca:
        headers.append((wire_load.FORMAT_HEADER, "JSON"))
    try:
        headers += _our_headers(request, objective) if dialect.ours else wire_headers.trace_context(request.headers)
        if isinstance(request.prompt, TensorCall):
            body, length = pipelines.encode_call(request.prompt)
            headers.append(length)
        else:
            body = encode_request(request, model, context_tokens, dialect, fields)
    except (ValueError, TypeError, OverflowError) as error:  # JSON takes no lone surrogate, and no NaN
        raise InvalidRequest(f"the request cannot be written as JSON: {type(error).__name__}") from error
    check_headers(headers)
    return HttpRequest(path_of(request, model), headers, body, method)


def check_headers(headers: Sequence[tuple[str, str]]) -> None:
    """Refuse what no header can carry.

    Raises:
        InvalidRequest: names the header.
    """
    if _is_ascii_line("".join(map("".join, headers))):
        return
    for name, value in headers:
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


def path_of(request: InferenceRequest, model: str) -> str:
    if isinstance(request.prompt, EmbedCall):
        return embeddings.PATH
    if isinstance(request.prompt, PassedCall):
        return passed.path_of(request.prompt, model)
    if isinstance(request.prompt, TensorCall):
        return pipelines.path_of(model)
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
    if isinstance(request.prompt, Call):
        return _encode_call(request.prompt, model)
    prompt = request.to_continue
    body: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": _stream_options(dialect),
        **_sampling(request, dialect),
        **_logprobs(request, dialect),
        **_salt(request, dialect),
    }
    left = tokens_left(request)
    if isinstance(prompt, ChatPrompt):
        messages = [message_of(message) for message in prompt.messages]
        body.update(tool_fields(prompt, strict=dialect.tools == "strictly"))
        if request.continuation:
            messages.append({"role": "assistant", "content": request.continuation})
            body.update(dialect.continues(request))
        body["messages"] = messages
        if prompt.template_kwargs:
            body["chat_template_kwargs"] = orjson.Fragment(prompt.template_kwargs)
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


def _stream_options(dialect: Dialect) -> dict[str, bool]:
    options = {"include_usage": True}
    if dialect.running_usage:
        options["continuous_usage_stats"] = True
    if dialect.ours:
        options["overspill_brief"] = True  # an earlier version of ours sends whole events
    return options


def _encode_call(call: Call, model: str) -> bytes:
    if isinstance(call, TensorCall):
        return pipelines.encode_call(call)[0]
    return passed.named(call, model) if isinstance(call, PassedCall) else embeddings.encode_call(call, model)


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
    for name, spelled, value in dialect.asked(sampling):
        found[spelled] = _JSON_OF.get(name, _itself)(value)
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    constraint = sampling.constraint
    return found if constraint is None else found | dialect.constraints[constraint.kind](constraint)


def _salt(request: InferenceRequest, dialect: Dialect) -> dict[str, object]:
    """Say with whom its KV cache may be shared, where the server can tell that apart."""
    return {"cache_salt": wire_headers.salt_of(request.cache_owner)} if dialect.salts and request.cache_owner else {}


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
    "bad_words": list,
}
