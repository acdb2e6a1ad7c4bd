"""/v1/files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import IO

from starlette.routing import BaseRoute, Route

from router.base.errors import InvalidRequest
from router.gateway.endpoint import Endpoint, RequestContext, StreamReply, json_reply
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.gateway.jobs.bodies import encode, encode_list, keep_s, page_in
from router.gateway.jobs.query import query_of
from router.gateway.jobs.upload import Upload, Uploads
from router.jobs.database import failed
from router.jobs.jobs import Jobs
from router.jobs.objects import file_object
from router.jobs.records import BATCH_PURPOSE

_PIECE_BYTES = 1024 * 1024
_MOST_A_PAGE = 10_000


class FileRoutes:
    """The handlers of files: each caller sees its own."""

    def __init__(self, intake: Intake, jobs: Jobs) -> None:
        self._intake = intake
        self._jobs = jobs
        self._uploads = Uploads(jobs.begin_file, intake.deps.limits.body_timeout_s)

    def routes(self) -> list[BaseRoute]:
        upload = Endpoint("files_create", self._create, self._intake, read=self._uploads)
        return [
            Route("/v1/files", upload, methods=["POST"]),
            Route("/v1/files", Endpoint("files", self._list, self._intake), methods=["GET"]),
            Route("/v1/files/{file_id}", Endpoint("file", self._show, self._intake), methods=["GET"]),
            Route("/v1/files/{file_id}", Endpoint("file_delete", self._delete, self._intake), methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", Endpoint("content", self._content, self._intake), methods=["GET"]),
        ]

    async def _create(self, context: RequestContext) -> Reply:
        """Upload a file, as multipart/form-data with the parts `purpose` and `file`."""
        upload: Upload = context.received
        purpose = upload.fields.get("purpose")
        if upload.incoming is None:
            raise InvalidRequest("the form has no part `file`: send the file's bytes under that name", param="file")
        if purpose != BATCH_PURPOSE:
            shown = "is required" if purpose is None else f"`{purpose[:40]}` has no use here"
            raise InvalidRequest(f"`purpose` {shown}: files are kept for `{BATCH_PURPOSE}`", param="purpose")
        kept_s = keep_s(upload.fields)
        file = await self._jobs.keep_file(upload.incoming, context.caller.digest, upload.filename, kept_s)
        return json_reply(encode(file_object(file)))

    async def _list(self, context: RequestContext) -> Reply:
        """The caller's files, page by page."""
        query = query_of(context, {"after", "limit", "order", "purpose"})
        page = page_in(query, default=_MOST_A_PAGE, most=_MOST_A_PAGE)
        files, more = await self._jobs.list_files(context.caller.digest, page, query.get("purpose"))
        return json_reply(encode_list([file_object(file) for file in files], more=more))

    async def _show(self, context: RequestContext) -> Reply:
        """What a file is."""
        file = await self._jobs.file(context.caller.digest, context.params["file_id"])
        return json_reply(encode(file_object(file)))

    async def _delete(self, context: RequestContext) -> Reply:
        """Delete a file."""
        file_id = context.params["file_id"]
        await self._jobs.delete_file(context.caller.digest, file_id)
        return json_reply(encode({"id": file_id, "object": "file", "deleted": True}))

    async def _content(self, context: RequestContext) -> StreamReply:
        """The bytes of a file."""
        file = await self._jobs.file(context.caller.digest, context.params["file_id"])
        pieces = FilePieces(self._jobs.path_of(file))
        context.closers.append(pieces.close)
        head = [("content-length", str(file.bytes))]
        return StreamReply(head, await pieces.next(), pieces, "application/octet-stream")


class FilePieces:
    """A file of the disk, piece by piece; once it is open, deleting it does no harm.

    Raises:
        StorageFailed: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: IO[bytes] = path.open("rb")
        except OSError as error:
            raise failed(error) from error
        self._ahead: bytes | None = None
        self.ended = False

    async def next(self) -> bytes:
        """Return the next piece; it is the last one where nothing is behind it."""
        piece = await self._read() if self._ahead is None else self._ahead
        self._ahead = await self._read()
        self.ended = not self._ahead
        return piece

    async def _read(self) -> bytes:
        return await asyncio.to_thread(self._file.read, _PIECE_BYTES)

    def close(self) -> None:
        self._file.close()
