"""One message of a chat: roles and content parts into a `Message`."""

from __future__ import annotations

from typing import Any

import msgspec

from router.base.errors import InvalidRequest
from router.values.prompt import MediaPart, Message
from router.values.tool_calls import ToolCall
from router.wire.openai.media import MEDIA_TYPES, RawImage, RawSound, image_of, sound_of
from router.wire.openai.tools import RawCall, arguments_of, calls_of

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_MAY_BE_EMPTY = ("assistant", "tool")
"""An answer that came to nothing comes back without content, and so does the result of a function that returns none."""


_OF_RESPONSES = ("input_text", "output_text")
"""What /v1/responses calls a text: histories of one API are sent to the other, and vLLM takes them."""


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: RawImage | str | None = None
    input_audio: RawSound | None = None


class RawMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[RawCall] | None = None
    tool_call_id: str | None = None
    function_call: RawCall.Called | None = None
    refusal: str | None = None
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
    if raw.content is None and _ROLES[raw.role] not in _MAY_BE_EMPTY:
        raise InvalidRequest(f"`{at}.content` is required", param=f"{at}.content")
    call_id = raw.tool_call_id or (raw.name or "" if raw.role == "function" else "")
    if _ROLES[raw.role] == "tool" and not call_id:
        raise InvalidRequest(
            f"`{at}.tool_call_id` is required: the id of the call that this answers", param=f"{at}.tool_call_id"
        )
    if raw.content is None or isinstance(raw.content, str):
        refusal = raw.refusal if raw.role == "assistant" else None
        return Message(_ROLES[raw.role], raw.content or refusal or "", calls, call_id)
    parts = tuple(_part(part, f"{at}.content[{i}]", raw.role) for i, part in enumerate(raw.content))
    texts = [part for part in parts if isinstance(part, str)]
    return Message(_ROLES[raw.role], "".join(texts), calls, call_id, () if len(texts) == len(parts) else parts)


def _calls(raw: RawMessage, at: str) -> tuple[ToolCall, ...]:
    for name in ("tool_calls", "function_call"):
        if getattr(raw, name) and raw.role != "assistant":
            raise InvalidRequest(f"`{at}.{name}`: only a turn of role `assistant` calls", param=f"{at}.{name}")
    if raw.function_call is not None:  # the older way has no ids: the name is one
        called = raw.function_call
        return (ToolCall(called.name, called.name, arguments_of(called.arguments)),)
    return calls_of(raw.tool_calls or [], f"{at}.tool_calls")


def _part(part: _Part, at: str, role: str) -> str | MediaPart:
    if part.type in MEDIA_TYPES and role != "user":
        raise InvalidRequest(f"`{at}`: a `{part.type}` stands in a turn of role `user`, not `{role}`", param=at)
    if part.type == "image_url":
        return image_of(part.image_url, f"{at}.image_url")
    if part.type == "input_audio":
        return sound_of(part.input_audio, f"{at}.input_audio")
    if part.type == "thinking" and role == "assistant":
        return ""  # thoughts of turns before are no part of a conversation, here as in `reasoning_content`
    words = {"text": part.text} | ({"refusal": part.refusal} if role == "assistant" else {})
    words |= dict.fromkeys(_OF_RESPONSES, part.text)
    if part.type not in words:
        known = "`text`, `image_url` and `input_audio`"
        raise InvalidRequest(f"`{at}`: `{part.type[:40]}` is not served: send parts of type {known}", param=at)
    said = words[part.type]
    if said is None:
        field = "refusal" if part.type == "refusal" else "text"
        raise InvalidRequest(f"`{at}.{field}` is required", param=f"{at}.{field}")
    return said
