"""What a body says it is: content type and compression."""

from __future__ import annotations

import zlib
from codecs import BOM_UTF8

from router.base.errors import InvalidRequest
from router.gateway.endpoint import RequestContext
from router.gateway.errors import BodyTooLarge, UnsupportedMedia

_OF_BROWSERS = frozenset({"origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest"})
_FORMS = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
_MOST_MEMBERS = 1_024  # of one body in gzip; each costs some time, however little it holds
_FED_BYTES = 64 * 1024  # at once: what a member leaves unread is copied


def plain_body(context: RequestContext, max_bytes: int) -> bytes:
    """Return the body, decompressed if it came as gzip or deflate, without the byte order mark of some editors.

    Raises:
        UnsupportedMedia: another encoding.
        BodyTooLarge: it unpacks to more than `max_bytes`; it is not unpacked further than that.
        Shed: bodies of others leave no room for what it unpacks to.
        InvalidRequest: it is empty or damaged, or more follows it.
    """
    encoding = context.headers.get("content-encoding", "identity").lower()
    if not context.body:
        raise InvalidRequest("the request body is empty: send a JSON object")
    if encoding == "identity":
        return context.body.removeprefix(BOM_UTF8)
    if encoding not in {"gzip", "deflate"}:
        raise UnsupportedMedia(
            f"`content-encoding: {encoding[:40]}` is not read here: send gzip, deflate or a plain body",
            param="content-encoding",
        )
    body = _unpacked(context.body, encoding, max_bytes)
    context.share.grow(len(context.body) + len(body))
    context.body = body  # from here on its size is that of the prompt, not of its packing
    return body.removeprefix(BOM_UTF8)


def _unpacked(packed: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return what gzip or deflate holds; gzip in each of its members, which are one body (RFC 1952, section 2.2).

    Raises:
        BodyTooLarge: it is more than `max_bytes`; it is not unpacked further than that.
        InvalidRequest: it is damaged or cut, or something else follows it: half a body is none.
    """
    pieces: list[bytes] = []
    left, at, view = max_bytes, 0, memoryview(packed)
    for _ in range(_MOST_MEMBERS if encoding == "gzip" else 1):
        unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: gzip and zlib headers, told apart by themselves
        while at < len(view) and not unpack.eof:
            fed = view[at : at + _FED_BYTES]
            try:
                pieces.append(unpack.decompress(fed, left + 1))
            except zlib.error as error:
                raise _no_valid(encoding, str(error)) from None
            left -= len(pieces[-1])
            if left < 0:
                raise BodyTooLarge(f"the request body unpacks to more than the {max_bytes} bytes that this tier reads")
            at += len(fed) - len(unpack.unused_data)
        if not unpack.eof:
            raise _no_valid(encoding, "it ends early")
        if at == len(view):
            return b"".join(pieces)
    raise _no_valid(encoding, f"{len(view) - at} bytes follow the end of its data: pack the body in one piece")


def _no_valid(encoding: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the request body is no valid {encoding}: {why}", param="content-encoding")


def require_no_form(context: RequestContext) -> None:
    """Refuse the content types that a web page may send anywhere without being asked, where tensors are expected.

    Raises:
        UnsupportedMedia: it is one of them.
    """
    given = context.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() in _FORMS:
        raise UnsupportedMedia(
            f"`content-type: {given[:80]}` is not read here: send application/json or application/octet-stream",
            param="content-type",
        )


def require_no_page(context: RequestContext) -> None:
    """Refuse these content types where a browser sent them; what curl says of a body by itself is no reason.

    Browsers name the page that sends a form, or say that it is none.

    Raises:
        UnsupportedMedia: a web page may have sent it.
    """
    if not _OF_BROWSERS.isdisjoint(context.headers):
        require_no_form(context)


def require_json(context: RequestContext) -> None:
    """Refuse a body that says it is something else; a body that says nothing is taken for JSON.

    Raises:
        UnsupportedMedia: another content type.
    """
    given = context.headers.get("content-type", "application/json")
    essence = given.partition(";")[0].strip().lower()
    if essence != "application/json" and not (essence.startswith("application/") and essence.endswith("+json")):
        raise UnsupportedMedia(
            f"`content-type: {given[:80]}` is not read here: send application/json", param="content-type"
        )
