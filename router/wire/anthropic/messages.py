"""The body of /v1/messages → `ApiRequest`."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import TypeVar

import msgspec

from router.base.errors import InvalidRequest
from router.values.constraint import Constraint
from router.values.prompt import ChatPrompt, Message
from router.values.request import ApiRequest
from router.values.sampling import SamplingParams
from router.wire.anthropic.errors import ThreadsUnserved
from router.wire.anthropic.fields import CountCall, Format, MessagesCall
from router.wire.anthropic.tools import functions_shown
from router.wire.anthropic.turns import chat_of, system_of
from router.wire.body import decode_json
from router.wire.names import checked_field_names
from router.wire.openai.chat import MAX_MESSAGES
from router.wire.openai.constraints import JsonSchema, schema_constraint
from router.wire.openai.media import media_in
from router.wire.openai.template_kwargs import template_kwargs_of
from router.wire.openai.unserved import Unserved, only
from router.wire.sampling import nucleus, stop_strings

C = TypeVar("C", bound=CountCall)

_UNSERVED = Unserved(
    ("mcp_servers", only([]), "MCP servers are called by clients: offer what they have as `tools`"),
    ("container", only(), "no code is run here: leave it out"),
)
_COMPACTION = Unserved(("compaction", only(), "conversations are not summarized here: ask for a summary in a message"))
_messages_decoder = msgspec.json.Decoder(MessagesCall)
_count_decoder = msgspec.json.Decoder(CountCall)


def decode_messages(body: bytes) -> tuple[ApiRequest, MessagesCall]:
    """Decode the body of /v1/messages; return the request, and the fields that the reply depends on.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw, named = _decoded(_messages_decoder, body)
    _COMPACTION.refuse(raw, named)
    prompt, continuation = _prompt(raw)
    sampling = SamplingParams(
        max_tokens=raw.max_tokens,
        temperature=1.0 if raw.temperature is None else raw.temperature,
        top_p=nucleus(raw.top_p),
        top_k=max(0, raw.top_k or 0),
        stop=stop_strings(raw.stop_sequences, "stop_sequences"),
        constraint=_constraint(raw),
        reasoning_effort=None if raw.output_config is None else raw.output_config.effort,
    )
    return ApiRequest(raw.model, prompt, sampling, continuation, stream=bool(raw.stream)), raw


def decode_count(body: bytes) -> ApiRequest:
    """Decode the body of /v1/messages/count_tokens.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw, _ = _decoded(_count_decoder, body)
    prompt, continuation = _prompt(raw)
    return ApiRequest(raw.model, prompt, SamplingParams(max_tokens=1), continuation)


def _decoded(decoder: msgspec.json.Decoder[C], body: bytes) -> tuple[C, AbstractSet[str]]:
    """Return the fields, and the names of those that the body has."""
    raw = decode_json(decoder, body)
    named = checked_field_names(body, frozenset(MessagesCall.__struct_fields__))
    if raw.thread is not None:
        raise ThreadsUnserved(
            "`thread`: nothing is kept between calls here: send the whole conversation, without it", param="thread"
        )
    _UNSERVED.refuse(raw, named)
    return raw, named


def _prompt(raw: CountCall) -> tuple[ChatPrompt, str]:
    """Return the conversation, and the beginning of the answer that it ends with."""
    if len(raw.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"`messages`: {len(raw.messages)}, at most {MAX_MESSAGES} are read", param="messages")
    if not raw.messages:
        raise InvalidRequest("`messages` is empty: send at least one message", param="messages")
    messages = [*system_of(raw.system), *chat_of(raw.messages)]
    continuation = _take_beginning(messages, f"messages[{len(raw.messages) - 1}]")
    tools = functions_shown(raw.tools, raw.tool_choice)
    return ChatPrompt(
        tuple(messages), tools, media_in(messages), template_kwargs_of(raw.chat_template_kwargs)
    ), continuation


def _take_beginning(messages: list[Message], at: str) -> str:
    """Pop the assistant's turn that the answer goes on from, where the conversation ends with one."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        return ""
    if last.tool_calls:
        raise InvalidRequest(
            f"`{at}`: the last turn calls a tool: send its `tool_result` in a turn of role `user`", param=at
        )
    messages.pop()
    if not any(message.role != "system" for message in messages):
        raise InvalidRequest(f"`{at}`: nothing precedes the answer that is to go on", param=at)
    return last.content


def _constraint(raw: MessagesCall) -> Constraint | None:
    newer = None if raw.output_config is None else raw.output_config.format
    wanted: Format | None = newer or raw.output_format
    if wanted is None:
        return None
    at = "output_format" if newer is None else "output_config.format"
    if wanted.type != "json_schema":
        raise InvalidRequest(f"`{at}.type`: `{wanted.type[:40]}` is not served: send `json_schema`", param=f"{at}.type")
    return schema_constraint(JsonSchema(schema=wanted.schema, strict=True), at)
