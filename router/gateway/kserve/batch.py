"""Several prompts of one V2 request: each is a request of its own to the router, and fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.base.errors import OverspillError, Refused
from router.base.timers import end
from router.gateway.bodies import BodyShare
from router.gateway.endpoint import RequestContext
from router.gateway.intake import Intake, Whole, collect
from router.values.answer import Answer
from router.values.request import ApiRequest, TextPrompt
from router.wire.headers import MAX_REQUEST_ID_CHARS
from router.wire.kserve.call import InferCall
from router.wire.kserve.reply import Row


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt's answer, and how it was routed."""

    whole: Whole
    answer: Answer

    @property
    def row(self) -> Row:
        return Row(self.whole.text, self.whole.finish_reason, self.whole.usage)


def requests_of(call: InferCall, model: str) -> list[ApiRequest]:
    """Return what each prompt asks of the router."""
    return [
        ApiRequest(model, TextPrompt(prompt.text), prompt.sampling, deadline_s=call.deadline_s)
        for prompt in call.prompts
    ]


async def answer_one(intake: Intake, context: RequestContext, request: ApiRequest) -> Answered:
    """Answer a prompt; raises any error of the tree."""
    answer, prompt_tokens = await intake.start(context, request)
    return Answered(await collect(answer.chunks, prompt_tokens), answer)


async def answer_all(
    intake: Intake, context: RequestContext, requests: Sequence[ApiRequest]
) -> list[Answered | OverspillError]:
    """Answer every prompt, side by side; returns what became of each, in their order.

    The first goes under the request's own id and place, the others under `ID.1`, `ID.2`, … and places of their own.
    """
    parts = [context, *(_part(intake, context, index, one) for index, one in enumerate(requests) if index)]
    tasks = [
        asyncio.create_task(_answered(intake, part, request), name="gateway batch")
        for part, request in zip(parts, requests, strict=True)
    ]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end(*tasks)


async def _answered(intake: Intake, part: RequestContext, request: ApiRequest) -> Answered | OverspillError:
    try:
        if not part.closers:
            intake.admit(part)
        return await answer_one(intake, part, request)
    except OverspillError as error:
        if isinstance(error, Refused) and part.stay is not None:
            part.stay.refused()
        return error
    finally:
        if part.chunks is not None:
            await part.chunks.aclose()
        part.close()


def _part(intake: Intake, context: RequestContext, index: int, request: ApiRequest) -> RequestContext:
    mark = f".{index}"
    prompt = request.prompt
    return replace(
        context,
        request_id=f"{(context.request_id or '')[: MAX_REQUEST_ID_CHARS - len(mark)]}{mark}",
        share=BodyShare(intake.room),
        body=prompt.text.encode() if isinstance(prompt, TextPrompt) else b"",  # its size is what a link has to carry
        chunks=None,
        stay=None,
        closers=[],
        timings_ms=[],
        told=[],
    )
