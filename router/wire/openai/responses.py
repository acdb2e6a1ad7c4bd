"""The body of /v1/responses → `ApiRequest`. Nothing is kept between calls: each has its whole conversation."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from router.base.errors import InvalidRequest
from router.values.constraint import ANY_OBJECT, Constraint, ConstraintKind
from router.values.prompt import ChatPrompt, MediaPart, Message
from router.values.request import ApiRequest
from router.values.sampling import SamplingParams
from router.values.tool_calls import ToolCall
from router.wire.body import decode_json
from router.wire.names import checked_field_names
from router.wire.openai.chat import MAX_MESSAGES
from router.wire.openai.constraints import JsonSchema, constraint_of, schema_constraint
from router.wire.openai.custom_text import arguments_of_text
from router.wire.openai.fields import UNSERVED, Fields, refuse_constraint_beside
from router.wire.openai.media import RawImage, image_of, media_in
from router.wire.openai.responses_tools import (
    ResponsesChoice,
    ResponsesTool,
    function_name,
    functions_shown,
)
from router.wire.openai.sampling import Effort, TopLogprobs, sampling_of
from router.wire.openai.template_kwargs import template_kwargs_of
from router.wire.openai.tools import arguments_of
from router.wire.openai.unserved import Unserved, only
from router.wire.sampling import MaxTokens

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "refusal")


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class _Item(msgspec.Struct, frozen=True):
    type: str = "message"
    role: str | None = None
    content: str | list[_Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[_Part] | None = None


class _Format(msgspec.Struct, frozen=True):
    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class _Reasoning(msgspec.Struct, frozen=True):
    effort: Effort | None = None
    summary: str | None = None


class _Text(msgspec.Struct, frozen=True):
    format: _Format | None = None
    verbosity: str | None = None


class ResponsesCall(Fields, frozen=True, kw_only=True):
    """The fields of a body: how tokens are drawn and what an answer has to match may be said in a chat's words too."""

    input: str | list[_Item]
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    max_output_tokens: MaxTokens | None = None
    stream_options: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known, and served only at the value that changes nothing.
    previous_response_id: str | None = None
    previous_response: Any = None
    previous_input_messages: Any = None
    enable_response_messages: Any = None
    conversation: Any = None
    background: bool | None = None
    truncation: str | None = None
    reasoning: _Reasoning | None = None
    prompt: Any = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def alternatives(self) -> int | None:
        """How many alternatives are told beside the log probability of each token; None tells none at all."""
        return self.top_logprobs or (0 if _LOGPROBS in (self.include or ()) else None)


_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = frozenset(
    {
        _LOGPROBS,
        # Of tools that nobody calls here, of what callers sent themselves, and of thoughts, which are told as they are:
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_STATELESS = "nothing is kept between calls here: leave it out, and send the whole conversation as `input`"
_UNSERVED = Unserved(
    *UNSERVED,
    ("n", only(1), "a response has one answer: send several requests, or a chat"),
    ("previous_response_id", only(), _STATELESS),
    ("previous_response", only(), _STATELESS),
    ("previous_input_messages", only([]), _STATELESS),
    ("enable_response_messages", only(False), "messages are not returned: send the conversation to /tokenize"),
    ("conversation", only(), _STATELESS),
    ("background", only(False), "answers are given at once: leave it out, or use /v1/batches"),
    (
        "truncation",
        only("disabled", "auto"),
        "send `auto` or `disabled`: a conversation too long is refused either way",
    ),
    ("prompt", only(), "prompts are not kept here: send `instructions` and `input`"),
)
_decoder = msgspec.json.Decoder(ResponsesCall)
_FIELDS = frozenset(ResponsesCall.__struct_fields__)


def decode_responses(body: bytes) -> tuple[ApiRequest, ResponsesCall]:
    """Decode a body; return the request, and the fields that the reply repeats.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_decoder, body)
    _UNSERVED.refuse(raw, checked_field_names(body, _FIELDS))
    if unknown := next((name for name in raw.include or () if name not in _INCLUDED), ""):
        raise InvalidRequest(
            f"`include`: `{unknown[:60]}` is not known: send {', '.join(sorted(_INCLUDED))}", param="include"
        )
    messages = _messages(raw)
    tools = functions_shown(raw.tools or [], raw.tool_choice, parallel=raw.parallel_tool_calls)
    prompt = ChatPrompt(tuple(messages), tools, media_in(messages), template_kwargs_of(raw.chat_template_kwargs))
    request = ApiRequest(
        raw.model,
        prompt,
        _sampling(raw),
        stream=bool(raw.stream),
        priority=raw.priority,
        cache_salt=raw.cache_salt or "",
    )
    refuse_constraint_beside(tools, request.sampling.constraint)
    return request, raw


def _sampling(raw: ResponsesCall) -> SamplingParams:
    told = replace(raw, max_completion_tokens=raw.max_output_tokens or raw.max_completion_tokens)
    return replace(
        sampling_of(told, None, raw.alternatives),
        constraint=constraint_of(raw, _format(raw.text)),
        reasoning_effort=None if raw.reasoning is None else raw.reasoning.effort,
    )


def _messages(raw: ResponsesCall) -> list[Message]:
    messages = [] if not raw.instructions else [Message("system", raw.instructions)]
    items = [_Item(role="user", content=raw.input)] if isinstance(raw.input, str) else raw.input
    if not items:
        raise InvalidRequest("`input` is empty: send text, or at least one item", param="input")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"`input`: {len(items)} items, at most {MAX_MESSAGES} are read", param="input")
    for index, item in enumerate(items):
        _take(item, f"input[{index}]", messages)
    if not messages:
        raise InvalidRequest("`input` holds nothing to answer: send at least one message", param="input")
    return messages


def _take(item: _Item, at: str, messages: list[Message]) -> None:
    """Add an item to a conversation; calls that follow each other are one turn."""
    if item.type == "message":
        if item.role not in _ROLES:
            raise InvalidRequest(f"`{at}.role`: expected one of {', '.join(_ROLES)}", param=f"{at}.role")
        messages.append(_turn(item, _ROLES[item.role], f"{at}.content"))
    elif item.type in ("function_call", "custom_tool_call"):
        name = function_name(item.namespace, _given(item.name, f"{at}.name"))
        given = (
            arguments_of(item.arguments or "") if item.type == "function_call" else arguments_of_text(item.input or "")
        )
        call = ToolCall(_given(item.call_id, f"{at}.call_id"), name, given)
        last = messages[-1] if messages else None
        if last is not None and last.role == "assistant":
            messages[-1] = Message("assistant", last.content, (*last.tool_calls, call))
        else:
            messages.append(Message("assistant", "", (call,)))
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        call_id = _given(item.call_id, f"{at}.call_id")
        messages.append(Message("tool", _text_of(item.output, f"{at}.output"), call_id=call_id))
    elif item.type != "reasoning":
        raise InvalidRequest(
            f"`{at}.type`: `{item.type[:40]}` is not served: send messages, calls of functions and custom tools, and "
            "outputs of these",
            param=f"{at}.type",
        )


def _turn(item: _Item, role: str, at: str) -> Message:
    if role != "user" or not isinstance(item.content, list):
        return Message(role, _text_of(item.content, at))
    parts = tuple(_shown(part, f"{at}[{index}]") for index, part in enumerate(item.content))
    texts = [part for part in parts if isinstance(part, str)]
    return Message(role, "".join(texts), parts=() if len(texts) == len(parts) else parts)


def _shown(part: _Part, at: str) -> str | MediaPart:
    if part.type != "input_image":
        return _said(part, at)
    return image_of(None if part.image_url is None else RawImage(part.image_url, part.detail), f"{at}.image_url")


def _given(value: str | None, at: str) -> str:
    if not value:
        raise InvalidRequest(f"`{at}` is required", param=at)
    return value


def _text_of(content: str | list[_Part] | None, at: str) -> str:
    if content is None:
        raise InvalidRequest(f"`{at}` is required", param=at)
    if isinstance(content, str):
        return content
    return "".join([_said(part, f"{at}[{index}]") for index, part in enumerate(content)])


def _said(part: _Part, at: str) -> str:
    if part.type not in _TEXTS:
        raise InvalidRequest(
            f"`{at}`: `{part.type[:40]}` is not served: send text, and in turns of role `user` images", param=at
        )
    return part.text or part.refusal or ""


def _format(text: _Text | None) -> Constraint | None:
    wanted = None if text is None else text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_schema":
        schema = JsonSchema(wanted.name, wanted.schema, wanted.strict, wanted.description)
        return schema_constraint(schema, "text.format")
    if wanted.type == "json_object":
        return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT, strict=False, param="text.format")
    raise InvalidRequest(
        f"`text.format.type`: `{wanted.type[:40]}` is not served: send `text`, `json_object` or `json_schema`",
        param="text.format.type",
    )
