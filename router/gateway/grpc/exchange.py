"""One gRPC call as a request to the tier's own HTTP application, in this process and without a socket.

So intake, promises, authentication, limits, errors and metrics are the very same, whatever they become.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import grpc
from starlette.types import ASGIApp, Message, Scope

from router.base.loopback import is_loopback
from router.gateway.auth import CERTIFICATE
from router.wire.names import DEADLINE

_MOST_DEADLINE_S = 7 * 24 * 3600.0
_RETURN_SHARE, _RETURN_S = 0.01, 0.005  # of a deadline: for the answer's way back
# Of the connection, of the message's form, or set here.
_OWN = frozenset(
    {
        *("host", "origin", "te", "connection", "content-type", "content-length", "content-encoding"),
        *("transfer-encoding", "accept-encoding", "inference-header-content-length", "upgrade", "expect"),
    }
)
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    421: grpc.StatusCode.PERMISSION_DENIED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    431: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
OnPiece = Callable[[bytes], Awaitable[None]]


@dataclass(slots=True)
class Answered:
    """What the application answered.

    Attributes:
        headers: lower-case names; each may become metadata.
        body: empty of a stream, whose pieces went to `on_piece`.
    """

    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def code(self) -> grpc.StatusCode:
        """The status as gRPC has it."""
        if self.headers.get("x-should-retry") == "false" and self.status == 503:
            return grpc.StatusCode.DEADLINE_EXCEEDED  # the one promise of which no retry can help
        kind = grpc.StatusCode.INVALID_ARGUMENT if 400 <= self.status < 500 else grpc.StatusCode.INTERNAL
        return _CODES.get(self.status, kind)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers that say something about the answer, and when a client of gRPC may try again by itself."""
        kept = [(n, v) for n, v in self.headers.items() if n.startswith("x-") or n in {"server-timing", "retry-after"}]
        kept += [(n, v) for n, v in self.headers.items() if n in {"retry-after-ms", "endpoint-load-metrics"}]
        if "retry-after-ms" in self.headers:
            never = self.headers.get("x-should-retry") == "false"
            kept.append(("grpc-retry-pushback-ms", "-1" if never else self.headers["retry-after-ms"]))
        return tuple(kept)


class Exchange:
    """Puts gRPC calls to an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def ask(
        self,
        context: grpc.aio.ServicerContext,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        head_bytes: int | None = None,
        on_piece: OnPiece | None = None,
    ) -> Answered:
        """Put a request and gather the reply.

        Args:
            path: not quoted.
            head_bytes: length of the JSON part of `body`, where tensors follow it.
            on_piece: called with each piece of a reply of status 200, as it comes.

        Raises:
            asyncio.CancelledError: the caller is gone; what ran for it has ended.
        """
        headers = _headers(context, body, head_bytes)
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "2",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": urllib.parse.quote(path).encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": _client(context, headers),
            "server": None,
        }
        if certificate := _certificate(context):
            scope[CERTIFICATE] = certificate
        found, pieces, sent = Answered(), [], False

        async def receive() -> Message:
            nonlocal sent
            if sent:  # that the caller is gone is told by cancelling this task
                await asyncio.get_running_loop().create_future()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                found.status = message["status"]
                found.headers = {n.decode("latin-1").lower(): v.decode("latin-1") for n, v in message["headers"]}
            elif on_piece is not None and found.status == 200:
                await on_piece(message.get("body", b""))
            else:
                pieces.append(message.get("body", b""))

        await self._app(scope, receive, send)
        found.body = b"".join(pieces)
        return found


def _headers(context: grpc.aio.ServicerContext, body: bytes, head_bytes: int | None) -> list[tuple[bytes, bytes]]:
    """Return the call's metadata as headers of HTTP, and its timeout as the deadline that it is."""
    given = [(name.lower(), value) for name, value in _metadata(context) if name.lower() not in _OWN]
    lines = [(name, value) for name, value in given if not name.startswith((":", "grpc-")) and isinstance(value, str)]
    left_s = context.time_remaining()
    if left_s is not None and left_s < _MOST_DEADLINE_S:
        own_ms = max(1.0, (left_s * (1 - _RETURN_SHARE) - _RETURN_S) * 1000)
        asked = [value for name, value in lines if name == DEADLINE]
        if not any(_is_sooner(value, own_ms) for value in asked):
            lines = [line for line in lines if line[0] != DEADLINE or not _is_number(line[1])]
            lines.append((DEADLINE, f"{own_ms:.3f}"))
    lines += [("host", "localhost"), ("content-length", str(len(body))), ("content-type", "application/octet-stream")]
    if head_bytes is not None:
        lines.append(("inference-header-content-length", str(head_bytes)))
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in lines]


def _metadata(context: grpc.aio.ServicerContext) -> Iterable[tuple[str, str | bytes]]:
    return ((name, value) for name, value in context.invocation_metadata() or ())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_sooner(text: str, than_ms: float) -> bool:
    """Whether a deadline of the metadata is sooner; one that is no number is left to be refused."""
    return not _is_number(text) or float(text) <= than_ms


def _certificate(context: grpc.aio.ServicerContext) -> str:
    """Return the digest of the client's certificate, which the handshake has verified; empty where it sent none."""
    shown = context.auth_context().get("x509_pem_cert")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(shown[0].decode())).hexdigest() if shown else ""


def _client(context: grpc.aio.ServicerContext, headers: list[tuple[bytes, bytes]]) -> tuple[str, int] | None:
    """Return who calls; behind a proxy on this host, whom that names."""
    kind, _, address = urllib.parse.unquote(context.peer()).partition(":")
    if kind not in {"ipv4", "ipv6"}:
        return None
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    forwarded = [value for name, value in headers if name == b"x-forwarded-for"]
    if forwarded and is_loopback(host):
        return forwarded[-1].decode("latin-1").rpartition(",")[2].strip(), 0
    return host, int(port) if port.isdigit() else 0
