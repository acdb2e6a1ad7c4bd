"""One request to an upstream tier, from the request to the last event, as token chunks and errors of the tree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from router.base.clock import Clock
from router.base.errors import (
    InvalidRequest,
    LinkLost,
    OverspillError,
    ReplicaFailed,
    ReplicaUnreachable,
    Unavailable,
)
from router.upstream.codec.dialect import OVERSPILL
from router.upstream.codec.events import origin_of
from router.upstream.codec.packing import packed
from router.upstream.codec.refusals import COMPLETIONS_PATH, as_first_tier, decode_error, not_offered
from router.upstream.exchange.answer import OpenStream
from router.upstream.exchange.call import UpstreamRequest, remaining
from router.upstream.http.silence import Bound, LostNews, SilentError
from router.upstream.http.transport import (
    ConnectTrace,
    LeftError,
    NotConnectedError,
    PoolExhaustedError,
    Response,
    StreamingClient,
    TransportError,
    UnsendableError,
)
from router.values.chunk import Origin
from router.wire import load as wire_load
from router.wire import names as wire_names

_MAX_ERROR_BYTES = 64 * 1024
_MAX_WHOLE_BYTES = 64 * 1024 * 1024  # 2,048 vectors of 4,096 numbers in base64 are 45 MB
_ERROR_BODY_S = 5.0
_TIMING = re.compile(r"dur=([0-9.]+)")


class TransferSample(msgspec.Struct, frozen=True):
    """What the head of a real response tells about the link.

    Attributes:
        sent_bytes: of the body; body_bytes: before it was compressed.
        transfer_s: request sent → response head, without the time to connect and without what the upstream says it
            spent itself: one round trip and the transfer of the body.
        at_s: when the head was there, on the tier's clock.
        report: on the upstream's load, as it sent it with its answer; empty where it sent none.
        connect_s: what its new connection took, 0 where one was open.
    """

    transfer_s: float
    sent_bytes: int
    at_s: float
    report: str
    connect_s: float = 0.0
    body_bytes: int = 0


async def open_stream(
    client: StreamingClient, call: UpstreamRequest, clock: Clock, lost: LostNews
) -> tuple[OpenStream, TransferSample]:
    """Send the request and wait for the response head.

    Raises:
        InvalidRequest, LinkLost, Refused, ReplicaUnreachable: as `Replica.generate` says.
    """
    response, transfer = await send_request(client, call, clock, lost)
    try:
        return OpenStream(response, call, lost), transfer
    except BaseException:
        response.close()
        raise


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that came in one piece, what it is, and who it says answered."""

    body: bytes
    media_type: str
    transfer: TransferSample
    origin: Origin | None
    headers: Mapping[str, str]


async def fetch_answer(client: StreamingClient, call: UpstreamRequest, clock: Clock, lost: LostNews) -> WholeAnswer:
    """Send a request whose answer comes in one piece; cancelling it cancels the work there.

    Raises:
        InvalidRequest, LinkLost, Refused, ReplicaUnreachable: as `Replica.generate` says.
    """
    response, transfer = await send_request(client, call, clock, lost)
    body = await _whole_body(response, call, lost)
    media_type = response.headers.get("content-type", "")
    return WholeAnswer(body, media_type, transfer, origin_of(response.headers), response.headers)


async def fetch_whole(client: StreamingClient, call: UpstreamRequest, clock: Clock, lost: LostNews) -> bytes:
    """As `fetch_answer`; the body alone."""
    return (await fetch_answer(client, call, clock, lost)).body


async def _whole_body(response: Response, call: UpstreamRequest, lost: LostNews) -> bytes:
    try:
        with Bound(lost, None):
            body = await _read_some(response, _MAX_WHOLE_BYTES)
    except (TransportError, SilentError) as error:
        kind = LinkLost if isinstance(error, LeftError) else ReplicaFailed
        raise kind(f"{call.who}: the answer broke: {error}") from None
    finally:
        response.close()
    if len(body) >= _MAX_WHOLE_BYTES:
        raise ReplicaFailed(f"{call.who}: an answer of more than {_MAX_WHOLE_BYTES} bytes")
    return body


async def send_request(
    client: StreamingClient, call: UpstreamRequest, clock: Clock, lost: LostNews
) -> tuple[Response, TransferSample]:
    """Send a request and wait for the head of a good response.

    Raises:
        InvalidRequest, LinkLost, Refused, ReplicaUnreachable: as `Replica.generate` says.
    """
    objective = remaining(call.request, clock.now_s(), call.rtt_s, call.who, local=call.local)
    sent = call.encode(objective)
    body_bytes = len(sent.body)
    if call.packs:
        sent = packed(sent)
    if call.instance is not None:
        sent.headers.append((wire_names.INSTANCE, call.instance))
    trace = ConnectTrace(clock)
    began_s = clock.now_s()
    try:
        with Bound(lost, None):  # the dispatcher keeps the deadline, and says whose fault a silence is
            response = await client.send(sent.method, sent.path, sent.body, sent.headers, trace)
    except SilentError as error:
        raise ReplicaUnreachable(f"{call.who}: no answer: {error}") from None
    except PoolExhaustedError as error:
        raise Unavailable(f"{call.who}: {error}", retry_after_s=1.0) from None
    except UnsendableError as error:
        raise InvalidRequest(f"{call.who}: the request cannot be written as HTTP: {error}") from error
    except NotConnectedError as error:
        raise ReplicaUnreachable(f"{call.who}: {error}") from error
    except LeftError as error:
        raise LinkLost(f"{call.who}: {error}") from error
    except TransportError as error:
        raise ReplicaFailed(f"{call.who}: {error}") from error
    came_s = clock.now_s()
    elapsed_s = came_s - began_s - trace.connect_s
    if response.status != 200:
        raise await _refusal(response, call, sent.path.partition("?")[0], lost)
    return response, TransferSample(
        transfer_s=max(0.0, elapsed_s - _spent_there_s(response.headers.get("server-timing", ""))),
        sent_bytes=len(sent.body),
        body_bytes=body_bytes,
        at_s=came_s,
        report=response.headers.get(wire_load.HEADER, ""),
        connect_s=trace.connect_s,
    )


async def _refusal(response: Response, call: UpstreamRequest, path: str, lost: LostNews) -> OverspillError:
    try:
        with Bound(lost, _ERROR_BODY_S):
            body = await _read_some(response, _MAX_ERROR_BYTES)
    except (TransportError, SilentError):
        body = b""  # the status says enough
    finally:
        response.close()
    always_there = path == COMPLETIONS_PATH and call.dialect is OVERSPILL
    missing = None if always_there else not_offered(path, response.status, body, call.who)
    if missing is not None:
        return missing
    decode = decode_error if call.codec is None else call.codec.decode_error
    error = decode(response.status, response.headers, body, call.who)
    return as_first_tier(error, call.request.headers, call.who) if call.dialect.ours else error


async def _read_some(response: Response, limit_bytes: int) -> bytes:
    body = bytearray()
    while len(body) < limit_bytes and (data := await response.read()):
        body += data
    return bytes(body)


def _spent_there_s(server_timing: str) -> float:
    return sum(float(ms) for ms in _TIMING.findall(server_timing) if ms.count(".") <= 1 and ms != ".") / 1000
