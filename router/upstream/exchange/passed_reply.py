"""The other end of calls that are passed on: whole replies, and replies that go on piece by piece."""

from __future__ import annotations

from msgspec.structs import replace

from router.base.clock import Clock
from router.base.errors import LinkLost, ReplicaBroken, ReplicaFailed
from router.upstream.codec.events import origin_of
from router.upstream.exchange.call import UpstreamRequest
from router.upstream.exchange.stream import TransferSample, WholeAnswer, send_request
from router.upstream.http.silence import LostNews
from router.upstream.http.transport import LeftError, Response, StreamingClient, TransportError
from router.values.chunk import FinishReason, TokenChunk
from router.values.task import Passed, PassedCall
from router.wire.openai.passed import fault_of, told_tokens


def decode_answer(whole: WholeAnswer, call: PassedCall, who: str) -> TokenChunk:
    """Take a reply as it is, if it is one.

    Raises:
        ReplicaFailed: it is none.
    """
    fault = fault_of(call, whole.body)
    if fault:
        raise ReplicaFailed(f"{who}: {fault}")
    return TokenChunk(
        "",
        tokens=1,
        finish_reason=FinishReason.STOP,
        prompt_tokens=told_tokens(whole.body, whole.media_type),
        origin=whole.origin,
        output=Passed(whole.body, whole.media_type),
    )


async def open_reply(client: StreamingClient, call: UpstreamRequest, clock: Clock, lost: LostNews) -> OpenReply:
    """Send a call and wait for the head of its reply.

    Raises:
        InvalidRequest, Refused, ReplicaUnreachable: as `Replica.generate` says.
    """
    response, transfer = await send_request(client, call, clock, lost)
    return OpenReply(response, transfer, call.who, lost)


class OpenReply:
    """A reply whose head has arrived. `close` it in any case; early, that cancels the work there."""

    def __init__(self, response: Response, transfer: TransferSample, who: str, lost: LostNews) -> None:
        self.transfer = transfer
        self._response = response
        self._who = who
        self._lost = lost
        self._media_type = response.headers.get("content-type", "application/octet-stream")
        self._first = True
        lost.listen(self._lose)

    def close(self) -> None:
        self._lost.forget(self._lose)
        self._response.close()

    def _lose(self, why: str) -> None:
        self._response.end(TransportError(why))

    async def read(self) -> TokenChunk | None:
        """Return the next piece, None at the end.

        Raises:
            ReplicaFailed: it broke before the first one, or there was none.
            ReplicaBroken: it broke later.
            LinkLost: this machine has left the network that it came by.
        """
        first, self._first = self._first, False
        try:
            data = await self._response.read()
        except TransportError as error:
            kind = LinkLost if isinstance(error, LeftError) else ReplicaFailed if first else ReplicaBroken
            raise kind(f"{self._who}: the reply broke off: {error}") from None
        if not data and first:
            raise ReplicaFailed(f"{self._who}: the reply is empty")
        if not data:
            return None
        chunk = TokenChunk("", 0, output=Passed(data, self._media_type))
        return replace(chunk, origin=origin_of(self._response.headers)) if first else chunk
