"""What an answer has to match, as bodies say it: `response_format`, and the words of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from typing import Any

import msgspec

from router.base.errors import InvalidRequest
from router.values.constraint import ANY_OBJECT, Constraint, ConstraintKind
from router.wire.openai.sampling import SamplingFields

_MAX_CHOICES = 1_024
_ONE_OF = ("json", "regex", "choice", "grammar", "json_object")  # of `structured_outputs`


class JsonSchema(msgspec.Struct, frozen=True):
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's, and llama.cpp's, whose `schema` stands beside the type."""

    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | bool | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's; one of the first five, `_ONE_OF`."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class ConstraintFields(SamplingFields, frozen=True, kw_only=True):
    """The fields of chat and of completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None


def constraint_of(raw: ConstraintFields, beside: Constraint | None = None) -> Constraint | None:
    """Return what an answer to a body with these fields has to match; None if it may say anything.

    Args:
        beside: what a field that is not among these says of it.

    Raises:
        InvalidRequest: naming the field at fault; two constraints on one answer are none.
    """
    found = [one for one in (beside, _response_format(raw.response_format), *_structured(raw), *_guided(raw)) if one]
    if not found:
        return None
    first = found[0]  # the same one in the words of several servers is one: some clients send it to all of them
    if other := next((one for one in found if (one.kind, one.source) != (first.kind, first.source)), None):
        raise InvalidRequest(
            f"`{other.param}`: the answer is constrained by `{first.param}` already, and one constraint is "
            "enforced: send one of them",
            param=other.param,
        )
    return next((one for one in found if one.strict), first)


def schema_constraint(wanted: JsonSchema | None, at: str) -> Constraint:
    """Return the constraint of a named JSON schema.

    Args:
        at: the field's path.

    Raises:
        InvalidRequest: there is none.
    """
    if wanted is None or wanted.schema is None:
        raise InvalidRequest(f"`{at}.schema` is required: the JSON schema of the answer", param=f"{at}.schema")
    return Constraint(
        ConstraintKind.JSON_SCHEMA,
        _text(wanted.schema),
        strict=bool(wanted.strict),
        param=f"{at}.schema",
        name=wanted.name or "",
    )


def _response_format(wanted: ResponseFormat | None) -> Constraint | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_schema" and (wanted.schema is None or wanted.json_schema is not None):
        return schema_constraint(wanted.json_schema, "response_format.json_schema")
    if wanted.type not in ("json_object", "json_schema"):
        raise InvalidRequest(
            f"`response_format.type`: `{wanted.type[:40]}` is not served: send `text`, `json_object` or `json_schema`",
            param="response_format.type",
        )
    if wanted.schema is not None:
        return schema_constraint(JsonSchema(schema=wanted.schema), "response_format")
    return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT, strict=False, param="response_format")


def _structured(raw: ConstraintFields) -> list[Constraint | None]:
    wanted = raw.structured_outputs
    if wanted is None:
        return []
    at = "structured_outputs"
    if wanted.structural_tag is not None:
        raise InvalidRequest(f"`{at}.structural_tag` is not served: use `tools`", param=f"{at}.structural_tag")
    for name in ("whitespace_pattern", "disable_additional_properties"):
        if getattr(wanted, name):
            raise InvalidRequest(f"`{at}.{name}` is not served: leave it out", param=f"{at}.{name}")
    if all(getattr(wanted, name) is None for name in _ONE_OF):  # mistyped, most likely: the answer would be free
        raise InvalidRequest(f"`{at}` holds no constraint: send one of {', '.join(_ONE_OF)}", param=at)
    return [
        _json(wanted.json, f"{at}.json"),
        _regex(wanted.regex, f"{at}.regex"),
        _choice(wanted.choice, f"{at}.choice"),
        _grammar(wanted.grammar, f"{at}.grammar"),
        Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT, strict=False, param=f"{at}.json_object")
        if wanted.json_object
        else None,
    ]


def _guided(raw: ConstraintFields) -> list[Constraint | None]:
    return [
        _json(raw.guided_json, "guided_json"),
        _regex(raw.guided_regex, "guided_regex"),
        _choice(raw.guided_choice, "guided_choice"),
        _grammar(raw.guided_grammar, "guided_grammar"),
        _regex(raw.regex, "regex"),
        _grammar(raw.ebnf, "ebnf"),
        _grammar(raw.grammar or None, "grammar"),  # llama.cpp's clients send an empty one for none
        _json(raw.json_schema, "json_schema"),
    ]


def _json(schema: dict[str, Any] | bool | str | None, at: str) -> Constraint | None:
    if schema is None:
        return None
    return Constraint(ConstraintKind.JSON_SCHEMA, schema if isinstance(schema, str) else _text(schema), param=at)


def _regex(pattern: str | None, at: str) -> Constraint | None:
    return None if pattern is None else Constraint(ConstraintKind.REGEX, _not_empty(pattern, at), param=at)


def _choice(choices: list[str] | None, at: str) -> Constraint | None:
    if choices is None:
        return None
    if not 1 <= len(choices) <= _MAX_CHOICES or "" in choices:
        raise InvalidRequest(f"`{at}`: expected 1 to {_MAX_CHOICES} texts, none of them empty", param=at)
    return Constraint(ConstraintKind.CHOICE, _text(choices), param=at)


def _grammar(source: str | None, at: str) -> Constraint | None:
    if source is None:
        return None
    kind = ConstraintKind.GBNF if "::=" in source else ConstraintKind.LARK
    return Constraint(kind, _not_empty(source, at), param=at)


def _not_empty(text: str, at: str) -> str:
    if not text:
        raise InvalidRequest(f"`{at}` is empty: leave it out, or say what the answer has to match", param=at)
    return text


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
