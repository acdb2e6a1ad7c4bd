"""Leads a journey: binds, reads, hands on, and tries the next replica when one breaks.

An async generator, which mypyc cannot compile, and nothing else: what it asks is in `journey.py`, which it can.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from router.base.errors import OverspillError
from router.dispatch.journey.journey import Journey
from router.values.chunk import FinishReason, TokenChunk
from router.values.request import Outcome


async def chunks_of(journey: Journey) -> AsyncGenerator[TokenChunk, None]:
    """Stream the answer, once; every exit leaves exactly one outcome in the record, and closing it ends the work.

    The last chunk is handed on as soon as everything is given back. The request is taken leave of when its reader comes
    again or closes the stream, which is when the caller has that chunk: nobody waits for what is counted and told.

    Raises:
        OverspillError: refused before the first chunk, or no replica could finish.
    """
    outcome, error = Outcome.CANCELLED, None
    last: TokenChunk | None = None
    try:
        while last is None:
            hedged = journey.begin(await journey.bind())
            try:
                async with hedged:
                    while True:
                        chunk = await hedged.receive()
                        if chunk.finish_reason is not None:
                            last = chunk
                            break
                        yield chunk
            except OverspillError as failure:
                journey.give_up_on(hedged.run.attempt, failure)
                if journey.is_complete():
                    # It broke after the last token and before saying so: nothing is missing but the reason.
                    last = TokenChunk("", tokens=0, finish_reason=FinishReason.LENGTH)
        journey.note_end(last, journey.dispatcher.clock.now_s())
        outcome = Outcome.DEGRADED if journey.degraded else Outcome.COMPLETED
        yield last
    except OverspillError as refusal:
        outcome, error = journey.refused(refusal), refusal.message
        raise
    except Exception as bug:
        outcome, error = Outcome.FAILED, f"internal error: {type(bug).__name__}"
        raise
    finally:
        journey.take_leave(outcome, error)
