"""Bodies of /tokenize: a conversation is counted with the tools that its chat would show."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.base.errors import InvalidRequest
from router.values.prompt import Prompt
from router.wire.openai.chat import decode_chat
from router.wire.openai.tokens import decode_tokenize

HELLO = [{"role": "user", "content": "hello"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "well"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def tokenized(**fields: Any) -> Prompt:
    return decode_tokenize(orjson.dumps({"model": "m", **fields}))[1]


@pytest.mark.parametrize("more", [{}, {"tool_choice": "none"}, {"chat_template_kwargs": {"custom": 1}}])
def test_tools_are_shown_as_in_a_chat(more: dict[str, Any]) -> None:
    asked = {"messages": HELLO, "tools": TOOLS, **more}
    assert tokenized(**asked) == decode_chat(orjson.dumps({"model": "m", **asked})).prompt
    begun = {"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True}
    assert tokenized(**{**asked, **begun}) == tokenized(**asked)
    assert tokenized(messages=HELLO, tools=[]) == tokenized(messages=HELLO)


def test_a_tool_at_fault_is_named() -> None:
    for tools, param in (([{"type": "search"}], "tools[0]"), ([{"function": {}}], "tools[0].function.name")):
        with pytest.raises(InvalidRequest) as raised:
            tokenized(messages=HELLO, tools=tools)
        assert raised.value.param == param
