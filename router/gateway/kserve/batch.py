"""The prompts of one V2 request, as requests of the router, and their answers as rows."""

from __future__ import annotations

from router.gateway.parts import Answered, Part
from router.values.prompt import TextPrompt
from router.values.request import ApiRequest
from router.wire.kserve.call import InferCall
from router.wire.kserve.reply import Row


def parts_of(call: InferCall, model: str) -> list[Part]:
    """Return what each prompt asks of the router."""
    return [
        Part(
            ApiRequest(model, TextPrompt(prompt.text), prompt.sampling, deadline_s=call.deadline_s),
            prompt.text.encode(),
        )
        for prompt in call.prompts
    ]


def row_of(answered: Answered) -> Row:
    whole = answered.whole
    return Row(whole.text, whole.finish_reason, whole.usage)
