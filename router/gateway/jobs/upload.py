"""A multipart upload, straight to the disk: of a file of any size a few hundred kilobytes are in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive

from router.base.errors import InvalidRequest, OverspillError, Shed
from router.base.timers import Interrupted, Interruptible
from router.gateway.bodies import ClientGone
from router.gateway.endpoint import RequestContext
from router.gateway.errors import BodyTimeout, UnsupportedMedia
from router.jobs.files import Incoming
from router.wire.headers import whole_number

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_PIECE_BYTES = 256 * 1024
_MOST_PARTS = 16
_MOST_FIELD_BYTES = 4096
_MOST_UPLOADS = 16
_MOST_OF_ONE = 8  # of one caller: slow uploads of one keep nobody else's out
_MOST_NAME_CHARS = 255
_MOST_SKIPPED_BYTES = 64 * 1024 * 1024
_RETRY_S = 2.0

Begin = Callable[[str, int], Awaitable[Incoming]]


@dataclass(slots=True)
class Upload:
    """What was received.

    Attributes:
        fields: of the form, but for the file.
        incoming: the file's bytes; None where the form had no file.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    incoming: Incoming | None = None


class Uploads:
    """Reads bodies of uploads, some at once; what is left of one goes when its request is over.

    Args:
        begin: begins to take in a file of an owner, with the bytes that are announced.
        stall_s: a body of which nothing comes for so long is refused.
    """

    def __init__(self, begin: Begin, stall_s: float) -> None:
        self._begin = begin
        self._stall_s = stall_s
        self._open: Counter[str] = Counter()  # by owner

    async def __call__(self, receive: Receive, context: RequestContext) -> None:
        """Read a body; the `Upload` becomes `context.received`.

        Raises:
            InvalidRequest: it is no such form.
            Shed: too many come at once, or the caller keeps too much.
            StorageFailed: there is no room, or it cannot be written.
            BodyTimeout: nothing came for too long.
            ClientGone: the connection closed first.
        """
        owner = context.caller.digest
        if self._open.total() >= _MOST_UPLOADS or self._open[owner] >= _MOST_OF_ONE:
            raise Shed(
                f"{self._open[owner]} uploads of yours and {self._open.total()} in all are under way here, at most "
                f"{_MOST_OF_ONE} and {_MOST_UPLOADS} may be: send it again later",
                retry_after_s=_RETRY_S,
            )
        self._open[owner] += 1
        body = _Body(receive, self._stall_s)
        try:
            await self._read(body, context)
        except (OverspillError, FormParserError) as error:
            await body.skip()
            context.told.append(("connection", "close"))  # of a longer body the rest is not read
            if isinstance(error, OverspillError):
                raise
            raise InvalidRequest(f"the request body is no valid multipart/form-data: {error}") from None
        finally:
            self._open -= Counter((owner,))

    async def _read(self, body: _Body, context: RequestContext) -> None:
        kind, options = parse_options_header(context.headers.get("content-type", ""))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise UnsupportedMedia(
                "files are uploaded as multipart/form-data, with the parts `purpose` and `file`", param="content-type"
            )
        if "content-encoding" in context.headers:
            raise UnsupportedMedia("uploads are not unpacked: send the file as it is", param="content-encoding")
        announced = whole_number(context.headers.get("content-length", "0"), 1 << 50) or 0
        incoming = await self._begin(context.caller.digest, announced)
        context.closers.append(incoming.drop)
        form = _Form()
        parser = MultipartParser(boundary, form.callbacks())
        while not body.whole:
            parser.write(await body.next())
            if len(form.data) >= _PIECE_BYTES or body.whole:
                data, form.data = bytes(form.data), bytearray()
                await asyncio.to_thread(incoming.write, data)
        parser.finalize()
        if not form.whole:
            raise InvalidRequest("the request body ends before its form does")
        upload = Upload(form.fields, form.filename, incoming if form.has_file else None)
        context.received = upload


class _Body:
    """The body of one request as it comes.

    Attributes:
        whole: its last piece was read.
    """

    def __init__(self, receive: Receive, stall_s: float) -> None:
        self._receive = receive
        self._stall_s = stall_s
        self.whole = False

    async def next(self) -> bytes:
        """Return the next piece.

        Raises:
            BodyTimeout: nothing came for too long.
            ClientGone: the connection closed.
        """
        timer = None
        try:
            with Interruptible() as block:
                timer = asyncio.get_running_loop().call_later(self._stall_s, block.interrupt)
                message = await self._receive()
        except Interrupted:
            self.whole = True  # nothing more is expected
            raise BodyTimeout(f"nothing of the upload came for {self._stall_s:g} s: send it again") from None
        finally:
            if timer is not None:
                timer.cancel()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self.whole = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def skip(self) -> None:
        """Read a while what nobody wants: a client that is still sending sees no reply, but a lost connection."""
        skipped = 0
        while not self.whole and skipped < _MOST_SKIPPED_BYTES:
            with contextlib.suppress(BodyTimeout):
                skipped += len(await self.next())


class _Form:
    """What the parser has found so far.

    Attributes:
        data: of the file, not yet written.
        whole: the closing boundary was seen.
    """

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.has_file = False
        self.data = bytearray()
        self.whole = False
        self._parts = 0
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._header = bytearray()
        self._header_value = bytearray()
        self._disposition = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_piece,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise InvalidRequest(f"the form has more than {_MOST_PARTS} parts")
        self._value, self._disposition = bytearray(), b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_piece(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header, self._header_value = bytearray(), bytearray()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if not self._is_file:
            return
        if self.has_file:
            raise InvalidRequest("the form has more than one part `file`: upload one file at a time", param="file")
        self.has_file = True
        self.filename = options.get(b"filename", b"file").decode("utf-8", "replace")[-_MOST_NAME_CHARS:]

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.data += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > _MOST_FIELD_BYTES:
            raise InvalidRequest(f"`{self._name[:80]}` is longer than {_MOST_FIELD_BYTES} bytes", param=self._name)

    def _part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.whole = True
