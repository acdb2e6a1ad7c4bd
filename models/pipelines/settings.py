"""How stateless models are served: what either tier's configuration says of their batches."""

from __future__ import annotations

from typing import Annotated

import msgspec

from models.pipelines.batching import BatchSettings


class ModelBatching(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The batches of a stateless model.

    Attributes:
        max_size: inputs computed together at most; 1 computes each alone. A CPU gains little beyond 16, and everybody
            of a larger batch waits for the last of it.
        max_wait_ms: how long an input may wait for company while an instance is idle, less where its deadline asks for
            it; 0 never waits: what came while the instances were busy is company enough.
        max_tokens: bound on a batch, padding included; what an instance may take of the memory follows from it.
        instances: batches computed at once. More than one no longer takes turns with the models that generate.
        queue_inputs: inputs that may be inside, waiting and computed; beyond that requests are refused with 503.
    """

    max_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    max_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4096
    instances: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    queue_inputs: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 8192

    @property
    def settings(self) -> BatchSettings:
        """Return them as the stage reads them; the buckets are the model's."""
        return BatchSettings(self.max_size, self.max_wait_ms, self.max_tokens)

    @property
    def slots(self) -> int:
        """Requests that a replica is sent at once: a batch for each instance, and another one on its way."""
        return 2 * self.max_size * self.instances
