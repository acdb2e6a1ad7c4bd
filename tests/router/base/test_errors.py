"""Errors quote what was sent, and a caller may have sent megabytes."""

from __future__ import annotations

from router.base.errors import InvalidRequest, Shed


def test_an_error_is_never_longer_than_somebody_reads() -> None:
    error = InvalidRequest("x" * 1_000_000, param="y" * 1_000_000)
    assert (len(error.message), len(str(error)), len(error.param or "")) == (4000, 4000, 200)
    assert error.message.endswith("…")
    short = Shed("full", retry_after_s=1.0)
    assert (short.message, short.param, short.retry_after_s) == ("full", None, 1.0)
