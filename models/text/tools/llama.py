"""Llama 3.1 and later: an answer that begins with an object is a call; several are parted by semicolons."""

from __future__ import annotations

from models.text.tools.format import CallWords, functions, literal, only_calls, repeated
from router.base.errors import InvalidRequest
from router.values.tool_calls import CallStyle, Tools


class Llama:
    """`models.text.tools.format.ToolFormat`."""

    style = CallStyle(opener="", closer="", aliases=("<|python_tag|>",))
    words = CallWords("", "; ", ', "parameters": ', "}")

    def call_id(self, given: str) -> str:
        return given

    def rules(self, tools: Tools, content: str, opener_id: int | None) -> str:  # noqa: ARG002 - nothing opens its calls
        calls = f"function {repeated(literal(self.words.following) + ' function', tools)}"
        lines = [functions(tools, self.words)]
        if only_calls(tools):
            return "\n".join([f"start: {calls}", *lines])
        if content == "TEXT":
            return "\n".join([f"start: TEXT | {calls}", "TEXT: /([^{ \\n](.|\\n)*)?/", *lines])
        raise InvalidRequest(
            "`response_format`: this model's calls of tools are JSON like its answers, and not told apart: send it "
            "with `tool_choice` `none`, or without `tools`",
            param="response_format",
        )


FORMAT = Llama()
