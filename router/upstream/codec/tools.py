"""Turns and tools in the words of OpenAI's API, and calls that a server tells in pieces back into text."""

from __future__ import annotations

import orjson

from router.values.call_writer import CallWriter
from router.values.prompt import ChatPrompt, Message
from router.values.request import InferenceRequest
from router.values.tool_calls import Tool, ToolChoice


def message_of(message: Message) -> dict[str, object]:
    """Return a turn as servers take it."""
    told: dict[str, object] = {"role": message.role, "content": _content(message)}
    if message.tool_calls:
        told["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.call_id:
        told["tool_call_id"] = message.call_id
    return told


def _content(message: Message) -> object:
    if not message.parts:
        return message.content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else orjson.Fragment(part.written)
        for part in message.parts
    ]


def tool_fields(prompt: ChatPrompt, *, strict: bool) -> dict[str, object]:
    """Return the fields that tell of the tools.

    Args:
        strict: the server leaves the arguments of a call that has to come free unless it is told not to.
    """
    tools = prompt.tools
    if tools is None:
        return {}
    fields: dict[str, object] = {
        "tools": [
            _function(tool, strict=tool.strict or (strict and tools.choice is ToolChoice.REQUIRED))
            for tool in tools.offered
        ]
    }
    fields["tool_choice"] = (
        {"type": "function", "function": {"name": tools.named}} if tools.named else tools.choice.value
    )
    if not tools.parallel and not tools.named:
        fields["parallel_tool_calls"] = False
    return fields


def _function(tool: Tool, *, strict: bool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "parameters": orjson.Fragment(tool.parameters)}
    if tool.description:
        function["description"] = tool.description
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def calls_in_text(request: InferenceRequest) -> CallWriter | None:
    """Return what writes the calls of an answer, None where it can have none."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt) or prompt.tools is None or not prompt.tools.callable:
        return None
    return CallWriter(request.continuation)
