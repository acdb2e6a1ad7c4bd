"""The answer to a request with tools, between a model's own text and the form of the stages."""

from __future__ import annotations

import json

from msgspec.structs import replace

from models.text.chat import PromptEncoder
from models.text.json_options import in_rules
from models.text.json_schemas import Schema
from models.text.tools.format import in_own_words, only_calls
from router.base.errors import InvalidRequest
from router.values.call_reader import CallReader
from router.values.call_writer import CallWriter
from router.values.chunk import FinishReason, TokenChunk
from router.values.constraint import Constraint, ConstraintKind
from router.values.prompt import ChatPrompt
from router.values.request import InferenceRequest
from router.values.sampling import SamplingParams
from router.values.tool_calls import Tools


def with_tools(request: InferenceRequest, encoder: PromptEncoder) -> ToolAnswer | None:
    """Return how the answer is to be led and read; None where no tool may be called.

    Raises:
        InvalidRequest: the request constrains the answer in a way that leaves no room for calls.
    """
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt) or prompt.tools is None or not prompt.tools.callable:
        return None
    return ToolAnswer(request, prompt.tools, encoder)


class ToolAnswer:
    """One answer.

    Attributes:
        sampling: the request's, held to calls of its tools.
        said: what is to be continued, in the model's own text.
        shown: special tokens that are part of that text.
    """

    def __init__(self, request: InferenceRequest, tools: Tools, encoder: PromptEncoder) -> None:
        form = encoder.tools
        opener = encoder.tokenizer.special_id(form.style.opener)
        wanted = request.sampling.constraint
        rules = form.rules(tools, _content(wanted), opener)
        either = wanted is not None and not only_calls(tools)
        constraint = Constraint(ConstraintKind.LARK, rules, param="tools", opener=form.style.opener if either else "")
        self.sampling: SamplingParams = replace(request.sampling, constraint=constraint)
        self.said = in_own_words(form, request.continuation)
        self.shown = frozenset() if opener is None else frozenset({opener})
        self._reader = CallReader.behind(self.said, form.style)
        self._writer = CallWriter(request.continuation)

    def onto(self, chunk: TokenChunk) -> TokenChunk:
        """Return a chunk of the model's own text in the form of the stages."""
        pieces = self._reader.feed(chunk.text)
        if chunk.finish_reason is None:
            return replace(chunk, text=self._writer.write(pieces))
        text = self._writer.write(pieces + self._reader.finish())
        return replace(chunk, text=text + (self._writer.finish() if chunk.finish_reason is FinishReason.STOP else ""))


def _content(constraint: Constraint | None) -> str:
    """Return what an answer without calls may be, as the right side of a Lark rule."""
    if constraint is None:
        return "TEXT"
    if constraint.kind is not ConstraintKind.JSON_SCHEMA:
        raise InvalidRequest(
            f"`{constraint.param}`: an answer that may call `tools` is constrained by a JSON schema, or not at all",
            param=constraint.param,
        )
    try:
        return "%json " + in_rules(_object(json.loads(constraint.source)), strict=constraint.strict)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"`{constraint.param}`: this JSON schema cannot be enforced: {error}") from error


def _object(schema: object) -> Schema:
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")  # noqa: TRY004 (see `models.text.grammar.schema_text`)
    return schema
