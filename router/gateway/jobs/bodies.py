"""What requests for files and batches say, and lists page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson

from router.base.errors import InvalidRequest
from router.jobs.pages import Page
from router.wire.body import decode_json
from router.wire.headers import whole_number

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
_MOST_LABELS = 16


class ExpiresAfter(msgspec.Struct, frozen=True):
    """How long a file is kept: from when, and for how many seconds."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)]


class CreateBatch(msgspec.Struct, frozen=True):
    """The body of `POST /v1/batches`."""

    input_file_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    endpoint: str
    completion_window: str
    metadata: dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]] | None = (
        None
    )
    output_expires_after: ExpiresAfter | None = None


_create_decoder = msgspec.json.Decoder(CreateBatch)
_expires_decoder = msgspec.json.Decoder(ExpiresAfter)


def decode_create_batch(body: bytes) -> CreateBatch:
    """Decode strictly.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    found = decode_json(_create_decoder, body)
    if found.endpoint not in _ENDPOINTS:
        raise InvalidRequest(
            f"`endpoint`: `{found.endpoint[:80]}`: batches are run for {', '.join(_ENDPOINTS)}", param="endpoint"
        )
    if found.metadata is not None and len(found.metadata) > _MOST_LABELS:
        raise InvalidRequest(f"`metadata` has {len(found.metadata)} pairs, at most {_MOST_LABELS}", param="metadata")
    return found


def keep_s(form: Mapping[str, str]) -> int | None:
    """Return for how long an upload is to be kept, None where it does not say.

    Raises:
        InvalidRequest: it says so in a way that is not understood.
    """
    found = {name[14:-1]: value for name, value in form.items() if name.startswith("expires_after[")}
    if not found:
        return None
    seconds: Any = found.get("seconds", "")
    tree = {**found, "seconds": int(seconds) if seconds.isdigit() and len(seconds) < 12 else seconds}
    try:
        return decode_json(_expires_decoder, orjson.dumps(tree)).seconds
    except InvalidRequest as error:
        raise InvalidRequest(f"`expires_after`: {error.message}", param="expires_after") from None


def page_in(query: Mapping[str, str], *, default: int, most: int) -> Page:
    """Read which part of a list is asked for.

    Raises:
        InvalidRequest: naming the parameter at fault.
    """
    text = query.get("limit", str(default))
    limit = whole_number(text, most)
    if not limit:
        raise InvalidRequest(f"`limit`: `{text[:20]}`: expected a whole number from 1 to {most}", param="limit")
    order = query.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise InvalidRequest(f"`order`: `{order[:20]}`: expected `asc` or `desc`", param="order")
    return Page(limit, query.get("after") or None, newest_first=order == "desc")


def encode(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value)


def encode_list(items: Sequence[Mapping[str, Any]], *, more: bool) -> bytes:
    ids = [item["id"] for item in items]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return orjson.dumps({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": more})
