"""Each family's grammar takes what the family writes, from any cut, and nothing that is no call of the tools."""

from __future__ import annotations

import json

import pytest

from models.text.grammar import Grammars
from models.text.tokenizer import Tokenizer
from models.text.tools.format import in_own_words, written_whole
from models.text.tools.registry import format_of, open_format
from router.base.errors import InvalidRequest
from router.values.call_reader import CallReader
from router.values.constraint import Constraint, ConstraintKind
from router.values.tool_calls import CallDelta, Tool, ToolChoice, Tools, call_text
from tests.support import tiny_tokenizer

SCHEMA = '{"type":"object","properties":{"city":{"type":"string"}},"required":["city"],"additionalProperties":false}'
OFFERED = (Tool("weather", "", SCHEMA, strict=True), Tool("time"))
TOKENIZER = Tokenizer(tiny_tokenizer.backend(), eos_ids=[2], bos_id=None, adds_bos=False)
GRAMMARS = Grammars(lambda: TOKENIZER)
FAMILIES = ["hermes", "llama", "mistral"]


def takes(family: str, tools: Tools, text: str, content: str = "TEXT") -> bool:
    rules = open_format(family).rules(tools, content, None)
    return GRAMMARS.matcher(Constraint(ConstraintKind.LARK, rules, param="tools")).advance_text(text)


def one(family: str, name: str, **arguments: object) -> str:
    return written_whole(open_format(family).words, "", [(name, json.dumps(arguments))])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", [ToolChoice.AUTO, ToolChoice.REQUIRED])
def test_a_call_has_to_fit_and_may_be_cut_anywhere(family: str, choice: ToolChoice) -> None:
    tools = Tools(OFFERED, choice)
    call = one(family, "weather", city="Paris")
    assert all(takes(family, tools, call[:cut]) for cut in range(len(call) + 1))
    assert takes(family, tools, one(family, "time"))
    assert not takes(family, tools, one(family, "other"))
    assert not takes(family, tools, one(family, "weather", town="Paris"))
    two = written_whole(open_format(family).words, "", [("weather", '{"city": "x"}'), ("time", "{}")])
    assert takes(family, tools, two)
    assert not takes(family, Tools(OFFERED, choice, parallel=False), two)


@pytest.mark.parametrize("family", FAMILIES)
def test_who_need_not_call_may_speak_or_answer_by_a_schema(family: str) -> None:
    assert takes(family, Tools(OFFERED), "It is sunny.\nIn Paris.")
    assert not takes(family, Tools(OFFERED, ToolChoice.REQUIRED), "It is sunny.")
    by_schema = "%json " + json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    if family == "llama":
        with pytest.raises(InvalidRequest, match="not told apart"):
            takes(family, Tools(OFFERED), '{"a": 1}', by_schema)
        return
    assert takes(family, Tools(OFFERED), '{"a": 1}', by_schema)
    assert takes(family, Tools(OFFERED), one(family, "time"), by_schema)
    assert not takes(family, Tools(OFFERED), "It is sunny.", by_schema)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_to_be_continued_becomes_the_familys_own_text(family: str) -> None:
    form, whole = open_format(family), call_text("weather", '{"city": "Paris"}')
    for cut in range(len(whole) + 1):
        begun = in_own_words(form, whole[:cut])
        assert takes(family, Tools(OFFERED, ToolChoice.REQUIRED), begun), (whole[:cut], begun)
    pieces = CallReader(form.style).feed(in_own_words(form, whole))
    (call,) = [piece for piece in pieces if isinstance(piece, CallDelta)]
    assert (call.name, call.arguments) == ("weather", '{"city": "Paris"}')


def test_families_are_told_by_their_templates() -> None:
    assert format_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert format_of("{% if tools %}<|python_tag|>{% endif %}") == "llama"
    assert format_of("{% if tools %}[TOOL_CALLS]{% endif %}") == "mistral"
    assert format_of("{{ messages }}") is None


@pytest.mark.parametrize(
    ("choice", "content"),
    [(ToolChoice.AUTO, "TEXT"), (ToolChoice.AUTO, '%json {"type": "object"}'), (ToolChoice.REQUIRED, "TEXT")],
)
def test_a_special_token_opens_every_call(choice: ToolChoice, content: str) -> None:
    backend = tiny_tokenizer.backend()
    backend.add_special_tokens(["<tool_call>"])
    tokenizer = Tokenizer(backend, eos_ids=[2], bos_id=None, adds_bos=False)
    opener = tokenizer.special_id("<tool_call>")
    rules = open_format("hermes").rules(Tools(OFFERED, choice), content, opener)
    call = '\n{"name": "time", "arguments": {}}\n</tool_call>'
    matcher = Grammars(lambda: tokenizer).matcher(Constraint(ConstraintKind.LARK, rules, param="tools"))
    assert opener is not None
    for ids in ([opener], tokenizer.encode(call), tokenizer.encode("\n"), [opener], tokenizer.encode(call)):
        for token in ids:
            assert matcher.allows(token), tokenizer.decode([token])
            matcher.advance(token)
