"""The answer of a simulated replica as a stream: an async generator, which mypyc cannot compile, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from router.simulation.call import Call
from router.values.chunk import TokenChunk
from router.values.replica import Give
from router.values.request import InferenceRequest


class Sent(Protocol):
    """A request that was sent to a simulated device."""

    @property
    def call(self) -> Call:
        """What comes back of it."""
        ...

    def chunk(self, new: int) -> TokenChunk:
        """Take so many new tokens as the next chunk of the answer."""
        ...

    def end(self) -> None:
        """Give back what it holds."""
        ...


class Serves(Protocol):
    """A simulated replica."""

    async def admit(self) -> None:
        """Return where it serves; raises `ReplicaUnreachable` where it does not."""
        ...

    def send(self, request: InferenceRequest, give: Give | None) -> Sent:
        """Send a request to its device."""
        ...


async def stream_of(replica: Serves, request: InferenceRequest, give: Give | None) -> AsyncGenerator[TokenChunk, None]:
    """Stream the answer; see `router.values.replica.Replica.generate`.

    Args:
        give: takes its text past the reader, as in `router.values.replica.Pushes`.
    """
    await replica.admit()
    sent = replica.send(request, give)
    try:
        while True:
            chunk = sent.chunk(await sent.call.next())
            yield chunk
            if chunk.finish_reason is not None:
                return
    finally:
        sent.end()
