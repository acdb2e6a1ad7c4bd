"""Answers of an upstream: who answers, as the head says, and the events of the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.base.json_input import UNREADABLE
from router.upstream.codec.logprobs import Logprobs
from router.upstream.codec.refusals import UpstreamError, counted
from router.values.chunk import FinishReason, Origin
from router.values.logprobs import TokenLogprob
from router.values.tool_calls import CallDelta
from router.values.usage import TokenDetails
from router.wire import headers as wire_headers
from router.wire import names as wire_names

_MAX_INT32 = 2**31 - 1
_MAX_EVENT_BYTES = 4 * 1024 * 1024
_MAX_NAME_CHARS = 128
_MAX_COUNTS = 32
_FIELD = b"data:"
_DONE = b"[DONE]"


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, gc=False):
    index: int = 0
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning: Any = None
    reasoning_content: Any = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    stop_reason: Any = None
    matched_stop: Any = None


class ToldUsage(msgspec.Struct, gc=False):
    """Of what type an upstream's figures are is not believed either: a wrong one is a missing one."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Any = None
    completion_tokens_details: Any = None

    def told_tokens(self, most: int) -> int | None:
        """Generated tokens so far; None where the upstream tells nothing that can be true."""
        return counted(self.completion_tokens, 0, most)

    def told_prompt_tokens(self, most: int) -> int | None:
        """Tokens of the prompt; None where the upstream tells nothing that can be true."""
        return counted(self.prompt_tokens, 1, most)

    def told_cached_tokens(self, most: int) -> int | None:
        """Tokens of the prompt that were cached; None where the upstream tells nothing that can be true."""
        details = self.prompt_tokens_details
        return counted(details.get("cached_tokens"), 0, most) if isinstance(details, dict) else None

    @property
    def details(self) -> TokenDetails | None:
        """What else it tells, by whatever names there are by now; None where that is nothing."""
        prompt, completion = _counts(self.prompt_tokens_details), _counts(self.completion_tokens_details)
        prompt.pop("cached_tokens", None)
        return TokenDetails(prompt, completion) if prompt or completion else None


def _counts(told: Any) -> dict[str, int]:
    """Return the counts in an object of them that can be true."""
    if not isinstance(told, dict):
        return {}
    names = [name for name in told if len(name) <= _MAX_NAME_CHARS and name.endswith("_tokens")][:_MAX_COUNTS]
    return {name: told[name] for name in names if counted(told[name], 0, _MAX_INT32) is not None}


class Event(msgspec.Struct, gc=False):
    """One event of a stream. `done` is set by the end mark; `cut`: nothing after it is wanted."""

    choices: list[_Choice] | None = []  # null beside the usage, where servers are written in Go
    usage: ToldUsage | None = None
    error: UpstreamError | str | None = None
    done: bool = False
    cut: bool = False

    @classmethod
    def of(cls, text: str, tokens: int | None, finish: FinishReason | None = None, *, stop: str | None = None) -> Event:
        """Return an event of another protocol than OpenAI's; `tokens` counts those of the answer so far.

        Args:
            stop: the stop string at which the answer was cut here, however the server goes on.
        """
        choice = _Choice(text=text, finish_reason=None if finish is None else finish.value, stop_reason=stop)
        usage = ToldUsage(completion_tokens=tokens)
        return cls(choices=[choice], usage=usage, done=finish is not None, cut=stop is not None)

    def told(self) -> tuple[str, str, bool]:
        """Return its text, what the model thought, and whether it tells a finish reason: asked of every token at once.

        Thoughts are `reasoning` of vLLM, `reasoning_content` of others; what is no text is nothing.
        """
        if not self.choices:
            return "", "", False
        choice = self.choices[0]
        delta, ends = choice.delta, choice.finish_reason is not None
        if delta is None:
            return choice.text or "", "", ends
        thought = delta.reasoning or delta.reasoning_content
        return delta.content or "", thought if isinstance(thought, str) else "", ends

    def logprobs(self, top: int) -> tuple[TokenLogprob, ...]:
        """What it tells of its tokens, with at most `top` alternatives each."""
        told = self.choices[0].logprobs if self.choices else None
        return () if told is None else told.values(top)

    @property
    def calls(self) -> list[CallDelta]:
        """What it adds to calls of tools."""
        delta = self.choices[0].delta if self.choices else None
        found = [] if delta is None or delta.tool_calls is None else delta.tool_calls
        functions = [(call.index, call.function) for call in found if call.function is not None]
        return [CallDelta(index, called.name or "", called.arguments or "") for index, called in functions]

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason; one that this project has no word for (`content_filter`) ends an answer like `stop`."""
        if not self.choices or self.choices[0].finish_reason is None:
            return None
        return FinishReason.LENGTH if self.choices[0].finish_reason == "length" else FinishReason.STOP

    def stop_of(self, asked: Sequence[str]) -> str | None:
        """Return which of the stop strings that were asked for ended the answer; None where it was none, or untold.

        vLLM says so in `stop_reason`, SGLang in `matched_stop`; of a token both tell its id.
        """
        if not asked or not self.choices:
            return None
        choice = self.choices[0]
        return next((told for told in (choice.stop_reason, choice.matched_stop) if told in asked), None)

    @property
    def error_message(self) -> str | None:
        if self.error is None:
            return None
        return (self.error if isinstance(self.error, str) else self.error.message) or "no message"

    @property
    def told_attempts(self) -> int | None:
        """Replicas that the upstream tried before it gave up."""
        return self.error.told_attempts if isinstance(self.error, UpstreamError) else None


_event_decoder = msgspec.json.Decoder(Event)


class EventParser:
    """Cuts a byte stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes. What is no completion chunk becomes an event with an error."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events: list[Event] = []
        for line in lines:
            if line.startswith(_FIELD):  # not blank lines, comments, other fields
                payload = line[len(_FIELD) :]
                try:
                    events.append(_event_decoder.decode(payload))
                except UNREADABLE as error:
                    events.append(_unreadable(payload, error))
        if len(self._rest) > _MAX_EVENT_BYTES:
            events.append(Event(error=f"an event of more than {_MAX_EVENT_BYTES} bytes"))
        return events

    def end(self) -> list[Event]:
        """The end of the body says nothing: a finish reason comes before it."""
        return []


def _unreadable(payload: bytes, error: Exception) -> Event:
    """Return what an event says that is no completion chunk: the end, or nothing that could be read."""
    if payload.strip() == _DONE:
        return Event(done=True)
    return Event(error=f"an event that is no completion chunk: {error}")


def origin_of(headers: Mapping[str, str]) -> Origin | None:
    """Read who answers from the response headers; None if the upstream does not say."""
    variant = _name(headers.get(wire_names.MODEL, ""))
    rung = wire_headers.whole_number(headers.get(wire_names.RUNG, ""), _MAX_INT32)
    if not variant or rung is None:
        return None
    return Origin(
        tier=_name(headers.get(wire_names.TIER, "")) or "cloud",
        variant=variant,
        rung=rung,
        degraded=headers.get(wire_names.DEGRADED) == "true",
        reason=_name(headers.get(wire_names.REASON, "")),
        max_tokens=wire_headers.whole_number(headers.get(wire_names.MAX_TOKENS, ""), _MAX_INT32) or None,
    )


def _name(told: str) -> str:
    """Return a name that an upstream tells, as it may stand in our own reply headers, logs and metrics."""
    return wire_names.header_safe(told[:_MAX_NAME_CHARS])
