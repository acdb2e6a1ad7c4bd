"""Errors → OpenAI's error bodies and events."""

from __future__ import annotations

import orjson

from router.base.errors import OverspillError


def error_fields(error: OverspillError) -> dict[str, object]:
    fields: dict[str, object] = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    if error.attempts:
        fields["attempts"] = error.attempts
    return fields


def encode_error(error: OverspillError) -> bytes:
    return orjson.dumps({"error": error_fields(error)})


def encode_error_event(error: OverspillError) -> bytes:
    """The event that ends a stream which cannot go on. No end mark follows: the answer is not complete."""
    return b"data: " + encode_error(error) + b"\n\n"
