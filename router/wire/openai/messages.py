"""One message of a chat: roles and content parts into a `Message`."""

from __future__ import annotations

from typing import Any

import msgspec

from router.base.errors import InvalidRequest
from router.values.request import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class RawMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None


def message_of(raw: RawMessage, index: int) -> Message:
    """Check message `index` of a chat.

    Raises:
        InvalidRequest: naming the part at fault.
    """
    at = f"messages[{index}]"
    if raw.role not in _ROLES:
        hint = " (tool calls are not offered by this server)" if raw.role in {"tool", "function"} else ""
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"`{at}.role`: got `{raw.role[:40]}`, expected one of {known}{hint}", param=f"{at}.role")
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(raw, name):
            raise InvalidRequest(f"`{at}.{name}` is not offered by this server: leave it out", param=f"{at}.{name}")
    if raw.content is None:
        raise InvalidRequest(f"`{at}.content` is required", param=f"{at}.content")
    if isinstance(raw.content, str):
        return Message(_ROLES[raw.role], raw.content)
    return Message(_ROLES[raw.role], "".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(raw.content)))


def _part(part: _Part, at: str) -> str:
    if part.type != "text":
        raise InvalidRequest(f"`{at}`: `{part.type[:40]}` is not served: send parts of type `text`", param=at)
    if part.text is None:
        raise InvalidRequest(f"`{at}.text` is required", param=f"{at}.text")
    return part.text
