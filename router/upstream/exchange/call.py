"""One request as it is put to a server: what is sent, to whom, and what is left of its promise."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from router.base.errors import DeadlineLost, InvalidRequest
from router.upstream.codec import openai as openai_client
from router.upstream.codec.dialect import OVERSPILL, Dialect
from router.upstream.codec.events import EventParser
from router.upstream.codec.protocol import AnswerParser, Codec
from router.values.request import InferenceRequest, Locality, Objective
from router.wire import names as wire_names

_LEAST_S = 0.001


class UpstreamRequest(msgspec.Struct, frozen=True):
    """What to send, and to whom.

    Attributes:
        model: the name to ask for.
        who: what to call the upstream in messages.
        context_tokens: window of the replica.
        rtt_s: round trip to take off the objective.
        instance: what to call this tier towards an upstream that issues credits, None for any other.
        dialect: what the server understands.
        local: it runs on this device, so that a `local-only` request may go there.
        codec: of a server that does not speak OpenAI's API; `dialect` says nothing then.
        fields: of the body, over its own; one that is None is left out.
        packs: a large body goes compressed: the server reads that, and the way to it is slow.
    """

    request: InferenceRequest
    model: str
    who: str
    context_tokens: int
    rtt_s: float
    instance: str | None = None
    dialect: Dialect = OVERSPILL
    local: bool = False
    codec: Codec | None = None
    fields: Mapping[str, object] | None = None
    packs: bool = False

    def encode(self, objective: Objective) -> openai_client.HttpRequest:
        """Return it as it goes over the wire; `objective` is what is left of the request's own.

        Raises:
            InvalidRequest: it cannot be written as HTTP or JSON, or not be put to this server.
        """
        if self.codec is not None:
            return self.codec.encode(self.request, self.context_tokens)
        return openai_client.encode_http(
            self.request, objective, self.model, self.context_tokens, self.dialect, fields=self.fields
        )

    def parser(self, headers: Mapping[str, str]) -> AnswerParser:
        """Return what reads the answer whose head holds `headers`."""
        if self.codec is not None:
            return self.codec.parser(self.request, self.context_tokens, headers)
        return EventParser()


def remaining(request: InferenceRequest, now_s: float, rtt_s: float, who: str, *, local: bool = False) -> Objective:
    """Return what is left of the promise once the request has travelled.

    A TTFT objective that is already lost, or was kept by the replica that began the answer, is left out: the upstream
    shall answer as well as it can rather than refuse what this tier has decided to serve. Past the deadline, what late
    value is left ends when it does here, and begins to fall at once.

    Raises:
        InvalidRequest: the request may not leave this tier.
        DeadlineLost: nothing is left.
    """
    objective = request.objective
    if objective.locality is Locality.LOCAL_ONLY and not local:
        raise InvalidRequest(f"{who}: the request is `local-only`", param=wire_names.LOCALITY)
    ttft_s, deadline_s, late_s = objective.ttft_s, objective.deadline_s, objective.late_s
    if ttft_s is None and deadline_s is None:
        return objective
    spent_s = max(0.0, now_s - request.accepted_at_s) + rtt_s
    if deadline_s is not None:
        deadline_s -= spent_s
        if late_s is not None and deadline_s < _LEAST_S:  # what is left falls from now on
            late_s += deadline_s - _LEAST_S
            deadline_s = _LEAST_S if late_s >= _LEAST_S else 0.0
        if deadline_s < _LEAST_S:
            raise DeadlineLost(f"{who}: the deadline would pass on the way", retry_after_s=1.0)
    if ttft_s is not None:
        ttft_s -= spent_s
        if request.continuation or ttft_s < _LEAST_S:
            ttft_s = None
    return replace(objective, ttft_s=ttft_s, deadline_s=deadline_s, late_s=late_s)
