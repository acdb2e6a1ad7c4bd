"""Tools, and answers that call them, as text.

Between the stages of a tier an answer is text alone, whatever model or server it comes from: a call stands in it as

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

So an answer that broke off in the middle of a call is continued like any other. Replicas write this form, whatever
their model writes (`call_writer`); the gateway reads it (`call_reader`).
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolChoice(enum.Enum):
    """Whether an answer calls tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call.

    Attributes:
        parameters: JSON schema of its arguments, as JSON.
        strict: nothing of the schema may be left out where it cannot be enforced.
    """

    name: str
    description: str = ""
    parameters: str = '{"type":"object"}'
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request.

    Attributes:
        offered: all of them, as the prompt shows them.
        named: the only one that may be called; empty for any.
        parallel: an answer may call several.
    """

    offered: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice.AUTO
    named: str = ""
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that the answer may call."""
        if self.choice is ToolChoice.NONE:
            return ()
        return tuple(tool for tool in self.offered if self.named in ("", tool.name))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call, as the history of a chat holds it; `arguments` is JSON."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call `index` of an answer; the first one of a call has its name, and no other."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How calls stand in text.

    Attributes:
        opener: stands before them; empty: an answer that begins with an object is a call.
        closer: stands behind each.
        aliases: what an answer may begin with besides, where there is no opener.
    """

    opener: str = OPEN
    closer: str = CLOSE
    aliases: tuple[str, ...] = ()


CANONICAL = CallStyle()


def call_text(name: str, arguments: str) -> str:
    """Return one whole call."""
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'
