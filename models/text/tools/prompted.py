"""Tools in the prompt of a model whose chat template knows none: told by the system, called as Hermes does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from models.text.tools.format import ToolFormat, written_whole
from router.values.prompt import Message
from router.values.tool_calls import Tool, Tools

_TOLD = """\
You may call functions to help with the user's request. These are their signatures, one a line:
<tools>
{tools}
</tools>
To call one, answer with an object of its name and its arguments, in these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def function_of(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates take it."""
    about = {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": about}


def in_plain_messages(messages: Sequence[Message], tools: Tools | None, called: ToolFormat) -> list[Message]:
    """Return a conversation in the roles that every template knows.

    Args:
        tools: what the system tells of; None tells nothing, but calls of earlier turns stay.
    """
    plain = [_plain(message, called) for message in messages]
    if tools is None or not tools.callable:
        return plain
    told = _TOLD.format(tools="\n".join(json.dumps(function_of(tool), ensure_ascii=False) for tool in tools.callable))
    if plain and plain[0].role == "system":
        return [Message("system", f"{plain[0].content}\n\n{told}"), *plain[1:]]
    return [Message("system", told), *plain]


def _plain(message: Message, called: ToolFormat) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    before = message.content + "\n" if message.content else ""
    return Message(message.role, written_whole(called.words, before, calls))
