"""What stands in for a model that has no replica at present: requests wait for it, and are told until when.

It offers slots and no credit (`router.values.replica.ReplicaSnapshot.credits`), so that the router predicts first
tokens behind the cold start, refuses promises that cannot be kept so late, and sends nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable

from router.base.errors import Unavailable
from router.values.chunk import TokenChunk
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest

PREFIX = "standby/"


class Standby:
    """`router.values.replica.Replica` that never serves.

    Args:
        like: a replica of the model, as it was.
        slots: that one has.
        ready_in_s: asked for the seconds until the first replica should serve.
    """

    def __init__(self, like: ReplicaInfo, slots: int, ready_in_s: Callable[[], float]) -> None:
        name = f"{PREFIX}{like.variant}"
        self._info = dataclasses.replace(like, replica_id=name, endpoint=name, device=name)
        self._slots = slots
        self._ready_in_s = ready_in_s

    @property
    def info(self) -> ReplicaInfo:
        return self._info

    @property
    def link(self) -> None:
        """None: nothing is sent anywhere."""
        return None

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            info=self._info, available=True, slots=self._slots, credits=0, credit_in_s=max(0.0, self._ready_in_s())
        )

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """Refuse: nothing is ever bound to it.

        Raises:
            Unavailable: always.
        """
        raise Unavailable(
            f"{request.model}: no replica is up; the first should be in {self._ready_in_s():.0f} s",
            retry_after_s=max(1.0, self._ready_in_s()),
        )
        yield  # an async generator, as the protocol asks
