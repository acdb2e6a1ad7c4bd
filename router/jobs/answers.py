"""Lines of output and error files, in the words of the OpenAI API."""

from __future__ import annotations

import orjson

from router.base.errors import OverspillError
from router.jobs.lines import LineFault
from router.jobs.objects import embedded
from router.jobs.records import Batch, BatchStatus, Line, LineAnswer, LineKind


def answered(line: Line, status: int, request_id: str, body: bytes) -> LineAnswer:
    """A reply was received: a success belongs into the output file, anything else into that of errors."""
    response = {"status_code": status, "request_id": request_id, "body": embedded(body)}
    kind = LineKind.OUTPUT if 200 <= status < 300 else LineKind.ERROR
    return LineAnswer(line.batch_id, line.number, kind, _encode(_id(line), line.custom_id, response, None))


def failed(line: Line, error: OverspillError) -> LineAnswer:
    """It could not be asked at all."""
    told = {"code": error.code, "message": error.message}
    return LineAnswer(line.batch_id, line.number, LineKind.ERROR, _encode(_id(line), line.custom_id, None, told))


def not_run(batch: Batch, line: Line) -> bytes:
    """The batch ended before this line was answered."""
    if batch.status is BatchStatus.CANCELLING:
        told = {"code": "batch_cancelled", "message": "the batch was cancelled before this request was answered"}
    else:
        told = {"code": "batch_expired", "message": f"the window of {batch.window} ended before it was answered"}
    return _encode(_id(line), line.custom_id, None, told)


def refused(batch_id: str, fault: LineFault) -> bytes:
    """A line for which the batch failed before any was run."""
    told = {"code": fault.code, "message": fault.message, "param": fault.param, "line": fault.line}
    return _encode(f"{_REQUEST}{batch_id[-12:]}_{fault.line or 0}", fault.custom_id, None, told)


_REQUEST = "batch_req_"


def _id(line: Line) -> str:
    return f"{_REQUEST}{line.batch_id[-12:]}_{line.number}"


def request_id(line: Line) -> str:
    """Return the request id of a line: the same each time it is run, and no other line's."""
    return f"{line.batch_id}.{line.number}"


def _encode(line_id: str, custom_id: str | None, response: object, error: object) -> bytes:
    told = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(told) + b"\n"
