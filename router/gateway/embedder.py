"""Embeds texts with a model of the tier, for answers that are given again to what means nearly the same."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import structlog

from router.base.clock import Clock
from router.base.errors import OverspillError
from router.cache.meaning import Vector
from router.cache.settings import CacheSettings
from router.gateway.deps import Dispatch
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.task import EmbedCall, Embeddings

log = structlog.get_logger("router.gateway")

_WITHIN_S = 0.5  # an embedding that takes longer than this spares nothing
_CHARS_A_TOKEN = 4
_ONE_PIECE = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class Embedder:
    """`router.cache.meaning.Embed` over a model that the router serves: it goes where the request itself may go."""

    dispatcher: Dispatch
    model: str
    clock: Clock

    async def __call__(self, request: InferenceRequest, text: str) -> Vector | None:
        """Return the vector of a text of a request, of unit length; None where none could be had at once."""
        asked = InferenceRequest(
            request_id=f"{request.request_id}.meaning"[-128:],
            model=self.model,
            prompt=EmbedCall((text,)),
            sampling=_ONE_PIECE,
            objective=Objective(
                deadline_s=_WITHIN_S, priority=request.objective.priority, locality=request.objective.locality
            ),
            prompt_tokens=max(1, len(text) // _CHARS_A_TOKEN),
            prompt_slack=len(text) // _CHARS_A_TOKEN,
            accepted_at_s=self.clock.now_s(),
            prompt_bytes=len(text),
            caller=request.caller,
        )
        try:
            answer = await self.dispatcher.start(asked)
            async with contextlib.aclosing(answer.chunks) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk.output, Embeddings):
                        return np.frombuffer(chunk.output.data, dtype="<f4")
        except OverspillError as error:
            log.info("no embedding for the cache", request_id=request.request_id, why=error.message)
        return None


def embedder(settings: CacheSettings, dispatcher: Dispatch, clock: Clock) -> Embedder | None:
    """Return what embeds messages for the cache of a tier, None where it gives answers to the very same alone."""
    if not settings.max_mbytes or not settings.similar_above:
        return None
    return Embedder(dispatcher, settings.embedding_model, clock)
