"""Several requests of one call: each is one of its own to the router, with a place of its own, and fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from router.base.errors import OverspillError, Refused
from router.base.timers import end
from router.gateway.bodies import BodyShare
from router.gateway.endpoint import RequestContext
from router.gateway.intake import Intake
from router.gateway.whole import Whole, collect
from router.values.answer import Answer
from router.values.request import ApiRequest
from router.values.usage import SharedPrompt
from router.wire.headers import MAX_REQUEST_ID_CHARS


class Part(msgspec.Struct, frozen=True):
    """One of them.

    Attributes:
        body: as large as what a link has to carry of it.
        prompt: shared with other parts; None where it has its own. first: of those that share it.
    """

    request: ApiRequest
    body: bytes
    prompt: SharedPrompt | None = None
    first: bool = True


class Answered(msgspec.Struct, frozen=True):
    """What became of it, and how it was routed."""

    whole: Whole
    answer: Answer


async def answer_one(intake: Intake, context: RequestContext, request: ApiRequest) -> Answered:
    """Answer a request; raises any error of the tree."""
    answer, prompt_tokens = await intake.start(context, request)
    return Answered(await collect(answer.chunks, prompt_tokens), answer)


async def answer_all(intake: Intake, context: RequestContext, parts: Sequence[Part]) -> list[Answered | OverspillError]:
    """Answer every part, side by side; returns what became of each, in their order."""
    tasks = [
        asyncio.create_task(_answered(intake, own, part), name="gateway part")
        for own, part in zip(contexts_of(intake, context, parts), parts, strict=True)
    ]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end(*tasks)


def contexts_of(intake: Intake, context: RequestContext, parts: Sequence[Part]) -> list[RequestContext]:
    """Return a context for each: the first goes under the call's own id and place, and ends before that is given back.

    The others go under `ID.1`, `ID.2`, …, and need places of their own (`enter`).
    """
    first = replace(context, chunks=None, closers=[])
    context.body = b""  # it is the first one's, who drops it
    return [first, *(_further(intake, context, index, part) for index, part in enumerate(parts) if index)]


def enter(intake: Intake, own: RequestContext, part: Part) -> None:
    """Give a part its place, unless it is the first of all; raises a `Refused` where there is none."""
    if own.stay is None or own.stay.beside:
        intake.admit(own)
    if part.prompt is not None and own.stay is not None:
        own.stay.share(part.prompt, first=part.first)


def note_refusal(own: RequestContext, error: OverspillError) -> None:
    """A part that is told to come back later is one that its tenant may send again."""
    if isinstance(error, Refused) and own.stay is not None:
        own.stay.refused(error)


async def leave(own: RequestContext) -> None:
    """End whatever a part still does, and give its place back."""
    if own.chunks is not None:
        await own.chunks.aclose()
    own.close()


async def _answered(intake: Intake, own: RequestContext, part: Part) -> Answered | OverspillError:
    try:
        enter(intake, own, part)
        return await answer_one(intake, own, part.request)
    except asyncio.CancelledError:
        if own.stay is not None:
            own.stay.unanswered()
        raise
    except OverspillError as error:
        note_refusal(own, error)
        return error
    finally:
        await leave(own)


def _further(intake: Intake, context: RequestContext, index: int, part: Part) -> RequestContext:
    mark = f".{index}"
    return replace(
        context,
        request_id=f"{(context.request_id or '')[: MAX_REQUEST_ID_CHARS - len(mark)]}{mark}",
        share=BodyShare(intake.room, context.caller.digest),
        body=part.body,
        chunks=None,
        stay=None if part.first or context.stay is None else context.stay.for_another_choice(),
        closers=[],
        timings_ms=[],
        told=[],
    )
