"""One request through the real `openai` client, and everything the caller can see of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpx
import openai
from openai.types.chat import ChatCompletionChunk


@dataclass(frozen=True)
class Ask:
    """What to send: a chat with one user turn, streamed, greedy.

    Attributes:
        full_length: generate `max_tokens` whatever the model wants, to put a known load on a tier.
    """

    prompt: str
    max_tokens: int = 48
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = "smollm2-135m"
    full_length: bool = False


@dataclass
class Reply:
    """What came back. `outcome` uses the words of the glossary; times are in milliseconds."""

    ask: Ask
    outcome: str = "failed"
    status: int = 0
    request_id: str = ""
    tier: str = ""
    variant: str = ""
    rung: str = ""
    reason: str = ""
    predicted_ttft_ms: float | None = None
    max_tokens: int | None = None
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""
    text: str = ""
    retry_after_s: float | None = None
    error: str = ""

    @property
    def served(self) -> bool:
        return self.outcome in {"completed", "degraded"}

    @property
    def refused_properly(self) -> bool:
        """Refused with a time to come back, as the contract asks; never a bare 429 or 503."""
        return self.outcome in {"shed", "unavailable"} and bool(self.retry_after_s)


async def send(client: openai.AsyncOpenAI, ask: Ask, on_text: Callable[[Reply], None] | None = None) -> Reply:
    """Send `ask` and follow the stream to its end. Never raises for what the server answers.

    Args:
        on_text: called after each piece of text, to act in mid-stream.
    """
    reply = Reply(ask)
    started_s = time.monotonic()
    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=ask.model,
            messages=[{"role": "user", "content": ask.prompt}],
            max_tokens=ask.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=dict(ask.headers),
            extra_body={"ignore_eos": True} if ask.full_length else None,
        )
        reply.status = raw.status_code
        _read_headers(reply, raw.headers)
        async for chunk in raw.parse():
            _read_chunk(reply, chunk, started_s)
            if on_text is not None and reply.text:
                on_text(reply)
        if reply.finish:
            reply.outcome = "degraded" if raw.headers.get("x-overspill-degraded") == "true" else "completed"
        else:
            reply.error = "the stream ended without a finish reason"
    except openai.APIStatusError as error:
        reply.status = error.status_code
        reply.error = error.message
        other = "invalid" if error.status_code < 500 else "failed"
        reply.outcome = {429: "shed", 503: "unavailable"}.get(error.status_code, other)
        _read_headers(reply, error.response.headers)
    except openai.APIError as error:  # an error event in the stream, a lost connection
        reply.error = f"{type(error).__name__}: {error}"
    except httpx.HTTPError as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.e2e_ms = (time.monotonic() - started_s) * 1e3
    return reply


def _read_chunk(reply: Reply, chunk: ChatCompletionChunk, started_s: float) -> None:
    if chunk.usage is not None:
        reply.prompt_tokens = chunk.usage.prompt_tokens
        reply.completion_tokens = chunk.usage.completion_tokens
    for choice in chunk.choices:
        if choice.delta.content:
            if reply.ttft_ms is None:
                reply.ttft_ms = (time.monotonic() - started_s) * 1e3
            reply.text += choice.delta.content
        reply.finish = choice.finish_reason or reply.finish


def _read_headers(reply: Reply, headers: Mapping[str, str]) -> None:
    reply.request_id = headers.get("x-request-id", "")
    reply.tier = headers.get("x-overspill-tier", "")
    reply.variant = headers.get("x-overspill-model", "")
    reply.rung = headers.get("x-overspill-rung", "")
    reply.reason = headers.get("x-overspill-reason", "")
    predicted = headers.get("x-overspill-predicted-ttft-ms")
    reply.predicted_ttft_ms = float(predicted) if predicted else None
    capped = headers.get("x-overspill-max-tokens")
    reply.max_tokens = int(capped) if capped else None
    if headers.get("retry-after-ms"):
        reply.retry_after_s = float(headers["retry-after-ms"]) / 1e3
    elif headers.get("retry-after"):
        reply.retry_after_s = float(headers["retry-after"])
