"""An answer that may call tools, or match a schema, is held to that schema as it would be without tools."""

from __future__ import annotations

from typing import Any

import pytest

from models.text.chat import PromptEncoder
from models.text.grammar import Matcher
from models.text.tools.answer import with_tools
from router.base.errors import InvalidRequest
from router.values.prompt import ChatPrompt, Message
from router.values.sampling import SamplingParams
from router.values.tool_calls import Tool, ToolChoice, Tools
from tests.models.text.test_grammar import GRAMMARS, TOKENIZER, of_schema
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import request

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["a"],
}


def matcher(*, strict: bool) -> Matcher:
    prompt = ChatPrompt((Message("user", "x"),), Tools((Tool("look"),)))
    sampling = SamplingParams(constraint=of_schema(SCHEMA, strict=strict))
    answer = with_tools(request(VirtualClock(), prompt=prompt, sampling=sampling), PromptEncoder(TOKENIZER, None))
    assert answer is not None
    assert answer.sampling.constraint is not None
    return GRAMMARS.matcher(answer.sampling.constraint)


def test_a_strict_schema_beside_tools_is_kept_whole_or_refused() -> None:
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        matcher(strict=True)


def test_of_another_what_cannot_be_enforced_is_passed_over() -> None:
    assert matcher(strict=False).advance_text('{"a":[1,1]}')
    assert matcher(strict=False).advance_text('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    assert not matcher(strict=False).advance_text('{"a":["x"]}')


def test_white_space_is_what_it_is_without_tools() -> None:
    assert matcher(strict=False).advance_text('{ "a":\n  [1]}')
    assert not matcher(strict=False).advance_text('{   "a":[1]}')


@pytest.mark.parametrize(
    ("choice", "schema", "opener"),
    [
        (ToolChoice.AUTO, SCHEMA, "<tool_call>"),
        (ToolChoice.AUTO, None, ""),
        (ToolChoice.REQUIRED, SCHEMA, ""),
    ],
)
def test_what_begins_a_call_is_told_where_an_answer_has_to_match_something_too(
    choice: ToolChoice, schema: dict[str, Any] | None, opener: str
) -> None:
    prompt = ChatPrompt((Message("user", "x"),), Tools((Tool("look"),), choice))
    sampling = SamplingParams(constraint=None if schema is None else of_schema(schema, strict=False))
    answer = with_tools(request(VirtualClock(), prompt=prompt, sampling=sampling), PromptEncoder(TOKENIZER, None))
    assert answer is not None
    assert answer.sampling.constraint is not None
    assert answer.sampling.constraint.opener == opener
