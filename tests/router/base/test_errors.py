"""Errors quote what was sent, and a caller may have sent megabytes; some are known by their words alone."""

from __future__ import annotations

from router.base.errors import ContextTooLong, InvalidRequest, Shed


def test_an_error_is_never_longer_than_somebody_reads() -> None:
    error = InvalidRequest("x" * 1_000_000, param="y" * 1_000_000)
    assert (len(error.message), len(str(error)), len(error.param or "")) == (4000, 4000, 200)
    assert error.message.endswith("…")
    short = Shed("full", retry_after_s=1.0)
    assert (short.message, short.param, short.retry_after_s) == ("full", None, 1.0)


def test_a_context_overflow_is_told_in_words_that_clients_look_for() -> None:
    """LiteLLM looks for the first words in lower case, LangChain for the last: the SDK's text leaves the code out."""
    error = ContextTooLong.of(2048, "the prompt has 9000 tokens", param="messages")
    assert "this model's maximum context length is 2048 tokens" in error.message.lower()
    assert "prompt is too long" in error.message
    assert (error.code, error.status, error.param) == ("context_length_exceeded", 400, "messages")
