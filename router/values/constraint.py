"""What every answer to a request has to match: JSON, a regular expression, one of some texts, or a grammar."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ConstraintKind(enum.Enum):
    """What `Constraint.source` is; the value is its name in messages."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    CHOICE = "list of choices"
    LARK = "grammar in Lark's notation"
    GBNF = "grammar in llama.cpp's notation"


ANY_OBJECT = '{"type":"object"}'
"""The schema of `json_object`."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint on the text of an answer.

    Attributes:
        source: a JSON schema as JSON; a regular expression that the whole answer matches; a JSON list of texts; a
            grammar.
        strict: nothing that `source` says may be left out; otherwise keywords that cannot be enforced are passed over.
        param: the field of the request that asked for it, for errors.
        name: what the caller calls a schema.
        opener: what begins a call, where `source` takes calls and answers alike, and an answer has to match something:
            the first token that the model would draw itself tells which of them it is about to write.
    """

    kind: ConstraintKind
    source: str
    strict: bool = True
    param: str = "response_format"
    name: str = ""
    opener: str = ""
