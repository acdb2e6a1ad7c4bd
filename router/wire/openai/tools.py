"""Tools, as chat bodies say it: `tools`, `tool_choice`, and the older `functions`, `function_call`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.base.json_input import UNREADABLE
from router.values.tool_calls import Tool, ToolCall, ToolChoice, Tools
from router.wire.openai.custom_text import TEXT_SCHEMA, arguments_of_text, refuse_grammar

MAX_TOOLS = 128
FunctionName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]


class Function(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Custom(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    format: dict[str, Any] | None = None


class RawTool(msgspec.Struct, frozen=True):
    type: str = "function"
    function: Function | None = None
    custom: Custom | None = None


class NamedTool(msgspec.Struct, frozen=True):
    """The object that `tool_choice` may be: one tool, or those of which calls are allowed."""

    class Named(msgspec.Struct, frozen=True):
        name: str

    class Allowed(msgspec.Struct, frozen=True):
        mode: Literal["auto", "required"]
        tools: list[NamedTool]

    type: str = "function"
    function: Named | None = None
    allowed_tools: Allowed | None = None
    custom: Named | None = None

    @property
    def name(self) -> str:
        """Of the tool that it names, empty where it names none."""
        named = self.custom if self.type == "custom" else self.function
        return "" if named is None else named.name


class RawCall(msgspec.Struct, frozen=True):
    class Called(msgspec.Struct, frozen=True):
        name: str
        arguments: str = "{}"

    class CalledWithText(msgspec.Struct, frozen=True):
        name: str
        input: str = ""

    id: str = ""
    type: str = "function"
    function: Called | None = None
    custom: CalledWithText | None = None


def tools_of(
    tools: list[RawTool] | None, choice: str | NamedTool | None, *, parallel: bool | None = None
) -> Tools | None:
    """Return the tools of a request, None where it has none.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("`tool_choice`: there are no `tools` to choose from", param="tool_choice")
        return None
    offered = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    if isinstance(choice, NamedTool) and choice.type == "allowed_tools":
        offered, choice = _allowed(offered, choice.allowed_tools)
    return _chosen(offered, choice, "tool_choice", parallel=parallel is not False)


def check_number(tools: Sequence[object]) -> None:
    """Raise `InvalidRequest` where there are more tools than are served."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"`tools`: {len(tools)}, at most {MAX_TOOLS} are served", param="tools")


def functions_of(functions: list[Function] | None, choice: str | NamedTool.Named | None) -> Tools | None:
    """Return the tools of a request in the older way, of which an answer calls one at most."""
    if not functions:
        return None
    named = NamedTool(function=choice) if isinstance(choice, NamedTool.Named) else choice
    return _chosen(tuple(map(tool_of, functions)), named, "function_call", parallel=False)


FunctionChoice = str | NamedTool.Named


def tool_of(function: Function) -> Tool:
    schema = function.parameters or {"type": "object", "properties": {}}
    return Tool(
        function.name, function.description or "", msgspec.json.encode(schema).decode(), strict=bool(function.strict)
    )


def calls_of(raw: list[RawCall], at: str) -> tuple[ToolCall, ...]:
    """Return what an assistant's turn called.

    Raises:
        InvalidRequest: naming the part at fault.
    """
    calls = []
    for index, call in enumerate(raw):
        if call.custom is not None:
            calls.append(ToolCall(call.id, call.custom.name, arguments_of_text(call.custom.input)))
            continue
        if call.function is None:
            raise InvalidRequest(f"`{at}[{index}].function` is required", param=f"{at}[{index}].function")
        calls.append(ToolCall(call.id, call.function.name, arguments_of(call.function.arguments)))
    return tuple(calls)


def arguments_of(text: str) -> str:
    """Return the arguments of a call in the history as a JSON object.

    What is none, as those of an answer that was cut, is kept as text under `invalid_json`: agents send it back beside
    what went wrong, and templates and servers take objects only.
    """
    try:
        value = msgspec.json.decode(text or "{}")
    except UNREADABLE:
        value = None
    return text or "{}" if isinstance(value, dict) else msgspec.json.encode({"invalid_json": text}).decode()


def custom_names(tools: list[RawTool] | None) -> frozenset[str]:
    """Return the names of the tools that are called with text."""
    return frozenset(tool.custom.name for tool in tools or [] if tool.type == "custom" and tool.custom is not None)


def _tool(raw: RawTool, at: str) -> Tool:
    if raw.type not in ("function", "custom"):
        raise InvalidRequest(
            f"`{at}`: `{raw.type[:40]}` is not served: send tools of type `function` or `custom`", param=at
        )
    if raw.type == "function" and raw.function is not None:
        return tool_of(raw.function)
    if raw.type == "function" or raw.custom is None:
        raise InvalidRequest(f"`{at}`: a tool of type `{raw.type}` has a `{raw.type}`", param=at)
    refuse_grammar(raw.custom.format, f"{at}.custom.format")
    return tool_of(Function(raw.custom.name, raw.custom.description, TEXT_SCHEMA, strict=True))


def _allowed(offered: tuple[Tool, ...], allowed: NamedTool.Allowed | None) -> tuple[tuple[Tool, ...], str]:
    """Return the tools that may be called, and how: the model is shown no others, so that any server keeps to them.

    Raises:
        InvalidRequest: none is allowed, or one that is not offered.
    """
    if allowed is None or not allowed.tools:
        raise InvalidRequest("`tool_choice.allowed_tools` names no tools", param="tool_choice.allowed_tools")
    names = {tool.name for tool in allowed.tools}
    unknown = names - {tool.name for tool in offered}
    if unknown:
        raise InvalidRequest(f"`tool_choice`: `{min(unknown)[:64]}` is none of the `tools`", param="tool_choice")
    return tuple(tool for tool in offered if tool.name in names), allowed.mode


def _chosen(offered: tuple[Tool, ...], choice: str | NamedTool | None, at: str, *, parallel: bool) -> Tools:
    check_number(offered)
    names = [tool.name for tool in offered]
    if len(set(names)) < len(names):
        raise InvalidRequest("`tools`: two have one name", param="tools")
    if isinstance(choice, NamedTool):
        if choice.type not in ("function", "custom"):
            raise InvalidRequest(
                f"`{at}`: `{choice.type[:40]}` is not served: name a `function` or a `custom` tool, or `allowed_tools`",
                param=at,
            )
        if not choice.name:
            raise InvalidRequest(f"`{at}`: a tool of type `{choice.type}` is named by `{choice.type}.name`", param=at)
        if choice.name not in names:
            raise InvalidRequest(f"`{at}`: `{choice.name[:64]}` is none of the `tools`", param=at)
        return Tools(offered, ToolChoice.REQUIRED, choice.name, parallel=False)
    known = {kind.value: kind for kind in ToolChoice}
    if choice is not None and choice not in known:
        raise InvalidRequest(f"`{at}`: `{choice[:40]}`: expected one of {', '.join(known)}, or a tool", param=at)
    return Tools(offered, ToolChoice.AUTO if choice is None else known[choice], parallel=parallel)
