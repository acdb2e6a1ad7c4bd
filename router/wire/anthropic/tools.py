"""Tools and `tool_choice` of Anthropic's API as functions, which is what models are shown."""

from __future__ import annotations

from collections.abc import Sequence

from router.base.errors import InvalidRequest
from router.values.tool_calls import Tools
from router.wire.anthropic.fields import Choice, ToolOffered
from router.wire.openai.tools import Function, NamedTool, RawTool, check_number, tools_of

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def functions_shown(tools: Sequence[ToolOffered] | None, choice: Choice | None) -> Tools | None:
    """Return the tools of a request, None where it has none.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    tools = tools or ()
    check_number(tools)
    shown = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if choice is None:
        return tools_of(shown, None)
    named = NamedTool(function=NamedTool.Named(choice.name or "")) if choice.type == "tool" else _CHOICES[choice.type]
    if choice.type == "tool" and not choice.name:
        raise InvalidRequest("`tool_choice.name` is required: of the tool to call", param="tool_choice.name")
    return tools_of(shown, named, parallel=not choice.disable_parallel_tool_use)


def _function(tool: ToolOffered, at: str) -> RawTool:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"`{at}`: `{(tool.type or '')[:60]}` is a tool of Anthropic's own servers and models, and not served here: "
            "send tools with a `name` and an `input_schema`",
            param=at,
        )
    for field in ("name", "input_schema"):
        if getattr(tool, field) is None:
            raise InvalidRequest(f"`{at}.{field}` is required", param=f"{at}.{field}")
    return RawTool("function", Function(tool.name or "", tool.description, tool.input_schema, tool.strict))
