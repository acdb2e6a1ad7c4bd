"""Files, batches and deferred requests as JSON objects: as OpenAI's where it has them."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from router.base.json_input import UNREADABLE
from router.jobs.records import Batch, Deferred, StoredFile

_STAMPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def file_object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_s,
        "expires_at": file.expires_s,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: Batch) -> dict[str, Any]:
    errors = {"object": "list", "data": orjson.loads(batch.errors)} if batch.errors else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_s,
        "expires_at": batch.expires_s,
        **{f"{step}_at": getattr(batch, f"{step}_s") for step in _STAMPS},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": orjson.loads(batch.labels),
    }


def deferred_object(deferred: Deferred) -> dict[str, Any]:
    """A deferred request; `response` is the reply that it would have had, null before there is one."""
    response = None
    if deferred.status_code is not None:
        response = {"status_code": deferred.status_code, "body": embedded(deferred.answer or b"null")}
    return {
        "id": deferred.id,
        "object": "deferred",
        "status": deferred.status.value,
        "endpoint": deferred.path,
        "request_id": deferred.request_id,
        "created_at": deferred.created_s,
        "expires_at": deferred.expires_s,
        "ended_at": deferred.ended_s,
        "deferred_for": orjson.loads(deferred.why),
        "response": response,
    }


def embedded(body: bytes) -> object:
    """Return a body as part of a larger one: as it is where it is JSON, otherwise as text."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
        return orjson.Fragment(body)
    except UNREADABLE:
        return body.decode("utf-8", "replace")
