"""One message of a chat: roles and content parts into a `Message`."""

from __future__ import annotations

from typing import Any

import msgspec

from router.base.errors import InvalidRequest
from router.values.prompt import Message
from router.values.tool_calls import ToolCall
from router.wire.openai.tools import RawCall, arguments_of, calls_of

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class RawMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[RawCall] | None = None
    tool_call_id: str | None = None
    function_call: RawCall.Called | None = None
    audio: Any = None


def message_of(raw: RawMessage, index: int) -> Message:
    """Check message `index` of a chat.

    Raises:
        InvalidRequest: naming the part at fault.
    """
    at = f"messages[{index}]"
    if raw.role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"`{at}.role`: got `{raw.role[:40]}`, expected one of {known}", param=f"{at}.role")
    if raw.audio:
        raise InvalidRequest(f"`{at}.audio` is not offered by this server: leave it out", param=f"{at}.audio")
    calls = _calls(raw, at)
    if raw.content is None and not calls:
        raise InvalidRequest(f"`{at}.content` is required", param=f"{at}.content")
    call_id = raw.tool_call_id or (raw.name or "" if raw.role == "function" else "")
    if _ROLES[raw.role] == "tool" and not call_id:
        raise InvalidRequest(
            f"`{at}.tool_call_id` is required: the id of the call that this answers", param=f"{at}.tool_call_id"
        )
    return Message(_ROLES[raw.role], _content(raw, at), calls, call_id)


def _content(raw: RawMessage, at: str) -> str:
    if raw.content is None or isinstance(raw.content, str):
        return raw.content or ""
    return "".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(raw.content))


def _calls(raw: RawMessage, at: str) -> tuple[ToolCall, ...]:
    for name in ("tool_calls", "function_call"):
        if getattr(raw, name) and raw.role != "assistant":
            raise InvalidRequest(f"`{at}.{name}`: only a turn of role `assistant` calls", param=f"{at}.{name}")
    if raw.function_call is not None:  # the older way has no ids: the name is one
        called = raw.function_call
        return (ToolCall(called.name, called.name, arguments_of(called.arguments, f"{at}.function_call")),)
    return calls_of(raw.tool_calls or [], f"{at}.tool_calls")


def _part(part: _Part, at: str) -> str:
    if part.type != "text":
        raise InvalidRequest(f"`{at}`: `{part.type[:40]}` is not served: send parts of type `text`", param=at)
    if part.text is None:
        raise InvalidRequest(f"`{at}.text` is required", param=f"{at}.text")
    return part.text
