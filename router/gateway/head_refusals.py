"""What a connection itself answers where it does not take a request head; the bounds on such heads.

The body is an error to clients of OpenAI and of Anthropic: which of them asks is not known yet.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Literal

MAX_HEAD_BYTES = 64 * 1024
MAX_TARGET_BYTES = 16 * 1024
HeadStatus = Literal[400, 408, 414, 431, 503]

_REASONS: Mapping[HeadStatus, bytes] = {
    400: b"Bad Request",
    408: b"Request Timeout",
    414: b"URI Too Long",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
_BODIES: Mapping[HeadStatus, bytes] = {
    400: b'{"type":"error","error":{"message":"this is not an HTTP request","type":"invalid_request_error",'
    b'"param":null,"code":"invalid_request"}}',
    408: b'{"type":"error","error":{"message":"the request head did not arrive in time","type":"invalid_request_error",'
    b'"param":null,"code":"request_timeout"}}',
    414: b'{"type":"error","error":{"message":"the path and query of the request are longer than %d bytes",'
    b'"type":"invalid_request_error","param":null,"code":"uri_too_long"}}' % MAX_TARGET_BYTES,
    431: b'{"type":"error","error":{"message":"the request head is larger than %d bytes",'
    b'"type":"invalid_request_error","param":null,"code":"headers_too_large"}}' % MAX_HEAD_BYTES,
    503: b'{"type":"error","error":{"message":"too many connections are open","type":"unavailable_error","param":null,'
    b'"code":"unavailable"}}',
}
_COME_BACK = b"retry-after: 1\r\nretry-after-ms: 1000\r\n"
_HEAD = (
    b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
    b"x-request-id: %s\r\n%s\r\n"
)


def head_refusal(status: HeadStatus) -> bytes:
    """Return the whole response, behind which the connection is closed; 503 says when to come back."""
    body, more = _BODIES[status], _COME_BACK if status == 503 else b""
    return _HEAD % (status, _REASONS[status], len(body), uuid.uuid4().hex.encode(), more) + body
