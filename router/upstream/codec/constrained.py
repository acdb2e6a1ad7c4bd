"""Constraints in the words of servers of other makers: what each kind is called there, and who lacks which."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import orjson

from router.values.constraint import ANY_OBJECT, Constraint, ConstraintKind
from router.values.feature import FEATURE_OF, Feature

Spelling = Callable[[Constraint], dict[str, object]]
Spellings = Mapping[ConstraintKind, Spelling]
"""How a server takes each kind of constraint; one that is missing is not taken."""


def lacking(spellings: Spellings) -> frozenset[Feature]:
    """Return what requests may need and a server with these does not do.

    None continues a constrained answer: what it knows of the constraint begins anew behind the text so far.
    """
    unknown = {feature for kind, feature in FEATURE_OF.items() if kind not in spellings}
    return frozenset({*unknown, Feature.CONTINUED_CONSTRAINT})


def _response_format(constraint: Constraint) -> dict[str, object]:
    if constraint.source == ANY_OBJECT and not constraint.name:
        return {"response_format": {"type": "json_object"}}
    return _json_schema(constraint, json.loads(constraint.source))


def _json_schema(constraint: Constraint, source: object) -> dict[str, object]:
    schema = {"name": constraint.name or "answer", "schema": source, "strict": constraint.strict}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _as_asked(constraint: Constraint) -> dict[str, object]:
    """Return a schema under the field that it came in, which an error then names."""
    if constraint.param.startswith(("structured_outputs", "guided")):
        return {"structured_outputs": {"json": constraint.source}}
    if constraint.source == ANY_OBJECT:
        return _response_format(constraint)
    return _json_schema(constraint, orjson.Fragment(constraint.source))  # any depth: who compiles it says its limit


def _structured_outputs(name: str) -> Spelling:
    """Return vLLM's way to say it; the list of choices is one, all else text."""

    def spell(constraint: Constraint) -> dict[str, object]:
        choices = constraint.kind is ConstraintKind.CHOICE
        return {"structured_outputs": {name: json.loads(constraint.source) if choices else constraint.source}}

    return spell


def _as(field: str) -> Spelling:
    return lambda constraint: {field: constraint.source}


def _choice_as_regex(constraint: Constraint) -> dict[str, object]:
    return {"regex": "|".join(map(re.escape, json.loads(constraint.source)))}


def _choice_as_gbnf(constraint: Constraint) -> dict[str, object]:
    choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(constraint.source))
    return {"grammar": "root ::= " + " | ".join(choices)}


OPENAI: Spellings = MappingProxyType({ConstraintKind.JSON_SCHEMA: _response_format})
VLLM: Spellings = MappingProxyType(
    {
        **OPENAI,
        ConstraintKind.REGEX: _structured_outputs("regex"),
        ConstraintKind.CHOICE: _structured_outputs("choice"),
        ConstraintKind.LARK: _structured_outputs("grammar"),
        ConstraintKind.GBNF: _structured_outputs("grammar"),
    }
)
OVERSPILL: Spellings = MappingProxyType({**VLLM, ConstraintKind.JSON_SCHEMA: _as_asked})
SGLANG: Spellings = MappingProxyType(
    {
        **OPENAI,
        ConstraintKind.REGEX: _as("regex"),
        ConstraintKind.CHOICE: _choice_as_regex,
        ConstraintKind.GBNF: _as("ebnf"),
    }
)
LLAMA_CPP: Spellings = MappingProxyType(
    {**OPENAI, ConstraintKind.CHOICE: _choice_as_gbnf, ConstraintKind.GBNF: _as("grammar")}
)
