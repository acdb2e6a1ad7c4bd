"""Tools of /v1/responses as functions, which is what models are shown: names in namespaces, text as one argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.values.tool_calls import Tools
from router.wire.openai.custom_text import TEXT_SCHEMA, refuse_grammar
from router.wire.openai.tools import Function, FunctionName, NamedTool, RawTool, tools_of

_OPTIONAL = ("web_search", "web_search_preview", "image_generation")
"""OpenAI's own servers run these, a model may do without, and agents offer them unasked."""


class ResponsesTool(msgspec.Struct, frozen=True):
    """One of `tools`; a namespace has some of its own."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=128)] | None = None

    @property
    def optional(self) -> bool:
        return self.type.startswith(_OPTIONAL)

    def told(self) -> dict[str, object]:
        """Return it as the reply repeats it."""
        whole: dict[str, object] = {"type": self.type, "name": self.name, "description": self.description}
        if self.type == "custom":
            return whole | {"format": self.format or {"type": "text"}}
        if self.type == "namespace":
            return whole | {"tools": [tool.told() for tool in self.tools or []]}
        return whole | {"parameters": self.parameters, "strict": self.strict}


class ResponsesChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The object that `tool_choice` may be."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ResponsesChoice] | None = None


class CallNames:
    """What the functions that a model is shown are called by the caller."""

    def __init__(self, tools: Sequence[ResponsesTool]) -> None:
        self._spaces: dict[str, tuple[str, str]] = {}
        self._customs: set[str] = set()
        for tool in tools:
            for inner in tool.tools or [] if tool.type == "namespace" else [tool]:
                flat = inner.name or ""
                if inner is not tool:
                    flat = function_name(tool.name, flat)
                    self._spaces[flat] = (tool.name or "", inner.name or "")
                if inner.type == "custom":
                    self._customs.add(flat)

    def takes_text(self, function: str) -> bool:
        return function in self._customs

    def told(self, function: str) -> dict[str, object]:
        """Return the names by which a call is told."""
        if (found := self._spaces.get(function)) is None:
            return {"name": function}
        return {"namespace": found[0], "name": found[1]}

    def meant(self, choice: ResponsesChoice) -> str:
        """Return the function that a choice names: wholly, or without its namespace where that is plain."""
        name = choice.name or ""
        if choice.namespace:
            return function_name(choice.namespace, name)
        found = [flat for flat, (_, local) in self._spaces.items() if local == name]
        return found[0] if len(found) == 1 else name


def function_name(namespace: str | None, name: str) -> str:
    """Return the one name of a tool of a namespace, as vLLM writes it."""
    return f"{namespace}__{name}" if namespace else name


def functions_shown(
    tools: Sequence[ResponsesTool], choice: str | ResponsesChoice | None, *, parallel: bool | None
) -> Tools | None:
    """Return the tools of a request as functions, None where it has none.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    told = choice.type if isinstance(choice, ResponsesChoice) else choice
    bound = told is not None and told.startswith(("required", *_OPTIONAL))
    shown: list[RawTool] = []
    for index, tool in enumerate(tools):
        if bound or not tool.optional:
            shown += _functions(tool, f"tools[{index}]")
    chosen = _named(choice, CallNames(tools)) if isinstance(choice, ResponsesChoice) else choice
    return tools_of(shown, chosen, parallel=parallel)


def _functions(tool: ResponsesTool, at: str) -> list[RawTool]:
    if tool.type != "namespace":
        return [_function(tool, at, None)]
    if not tool.tools or not tool.name:
        raise InvalidRequest(f"`{at}.tools`: a namespace has a `name` and at least one tool", param=f"{at}.tools")
    return [_function(inner, f"{at}.tools[{place}]", tool.name) for place, inner in enumerate(tool.tools)]


def _function(tool: ResponsesTool, at: str, namespace: str | None) -> RawTool:
    if tool.type not in ("function", "custom") or not tool.name:
        raise InvalidRequest(
            f"`{at}`: `{tool.type[:40]}` is not served: send tools of type `function`, `custom` or `namespace`, with a "
            "`name`",
            param=at,
        )
    name = function_name(namespace, tool.name)
    if tool.type == "function":
        return RawTool("function", Function(name, tool.description, tool.parameters, tool.strict))
    refuse_grammar(tool.format, f"{at}.format")
    return RawTool("function", Function(name, tool.description, TEXT_SCHEMA, strict=True))


def _named(choice: ResponsesChoice, names: CallNames) -> NamedTool:
    """Return a choice as chats have it, where the names lie one level deeper."""
    kind = "function" if choice.type == "custom" else choice.type
    allowed = None
    if choice.tools is not None:
        allowed = NamedTool.Allowed(choice.mode or "auto", [_named(tool, names) for tool in choice.tools])
    return NamedTool(kind, NamedTool.Named(names.meant(choice)), allowed)
