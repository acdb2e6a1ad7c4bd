"""How requests are put to a server, and its answers read, where it does not speak OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from router.base.errors import OverspillError
from router.upstream.codec.events import Event
from router.upstream.codec.openai import HttpRequest
from router.values.request import InferenceRequest


class AnswerParser(Protocol):
    """Cuts the body of one answer into events."""

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes; one with an error ends the answer."""
        ...

    def end(self) -> list[Event]:
        """Return what the end of the body says."""
        ...


class Codec(Protocol):
    """One model of such a server."""

    def encode(self, request: InferenceRequest, context_tokens: int) -> HttpRequest:
        """Return what asks for `request`.

        Raises:
            InvalidRequest: it cannot be put to this server. No server has seen it, so none is to blame.
        """
        ...

    def parser(self, request: InferenceRequest, context_tokens: int, headers: Mapping[str, str]) -> AnswerParser:
        """Return what reads the answer whose head holds `headers`."""
        ...

    def decode_error(self, status: int, headers: Mapping[str, str], body: bytes, who: str) -> OverspillError:
        """Turn a refusal into the error that the router understands."""
        ...
