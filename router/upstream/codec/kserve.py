"""The client's side of KServe V2 for text: one model's requests, and its answers, over whichever endpoint it has.

Triton's `generate_stream` answers with events, its `generate` with one JSON object; both take inputs by name, and
parameters beside them. `infer` is every V2 server's: named tensors, one answer. None of them tells why an answer ended
unless the model has an output for it: the body's end is the answer's, and `length` is concluded from its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import orjson

from router.base.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    OverspillError,
    ReplicaFailed,
    Shed,
    Unavailable,
)
from router.upstream.codec.events import Event
from router.upstream.codec.kserve_model import SAMPLING_JSON, TensorSpec, TextModel
from router.upstream.codec.openai import HttpRequest, check_headers, tokens_left
from router.upstream.codec.refusals import retry_after_s
from router.upstream.codec.stop_cut import StopCut
from router.values.chunk import FinishReason
from router.values.prompt import ChatPrompt, TextPrompt
from router.values.prompt_size import estimate_size
from router.values.request import InferenceRequest
from router.values.sampling import GREEDY_BELOW, SamplingParams
from router.values.template import Render
from router.wire import headers as wire_headers
from router.wire import names as wire_names

_MAX_EVENT_BYTES = 4 * 1024 * 1024
_DEFAULT = SamplingParams()
_TOO_LONG = re.compile(r"(exceed|longer than|too long|maximum).{0,80}(length|context|tokens|input)", re.IGNORECASE)
# Asked of a model that has inputs for them.
_ASKED = {
    "exclude_input_in_output": True,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}
_TELLING = ("finish_reason", "num_input_tokens", "num_output_tokens")
_STREAMING = ("stream", "streaming")


@dataclass(frozen=True, slots=True)
class KServeCodec:
    """One model of one server.

    Args:
        render: makes text of a conversation; None where the template is not known.
        triton: its errors are a Triton's: 400 also says that a model failed.
    """

    model: TextModel
    render: Render | None = None
    triton: bool = True

    def encode(self, request: InferenceRequest, context_tokens: int) -> HttpRequest:
        """Return what asks for `request`; see `router.upstream.codec.protocol.Codec`."""
        headers = [("accept", "*/*"), ("content-type", "application/json"), (wire_names.REQUEST_ID, request.request_id)]
        headers += wire_headers.trace_context(request.headers)
        inputs, parameters = self._fields(request, context_tokens)
        body: dict[str, object]
        if self.model.endpoint == "infer":
            body = {
                "id": request.request_id,
                "inputs": [_tensor(self.model.inputs[name], value) for name, value in inputs.items()],
                "outputs": [{"name": name} for name in self._wanted_outputs()],
                "parameters": parameters,
            }
        else:
            body = {**inputs, "parameters": parameters}
        try:
            data = orjson.dumps(body)
        except TypeError as error:  # JSON takes no lone surrogate
            raise InvalidRequest(f"the request cannot be written as JSON: {type(error).__name__}") from error
        check_headers(headers)
        return HttpRequest(f"/v2/models/{quote(self.model.name, safe='')}/{self.model.endpoint}", headers, data)

    def _wanted_outputs(self) -> list[str]:
        telling = [name for name in _TELLING if name in self.model.outputs]
        return [self.model.settings.text_output, *telling]

    def prompt_text(self, request: InferenceRequest) -> str:
        """Return the text to go on with: prompt, and what was emitted of the answer already.

        Raises:
            InvalidRequest: the prompt is none that this server could take.
        """
        prompt = request.prompt
        if isinstance(prompt, TextPrompt):
            return prompt.text + request.continuation
        if isinstance(prompt, ChatPrompt) and self.render is not None:
            return self.render(prompt, request.continuation)
        what = "a conversation, and its chat template is not known here" if isinstance(prompt, ChatPrompt) else "ids"
        raise InvalidRequest(f"{self.model.name} takes text, not {what}", param="prompt")

    def _fields(self, request: InferenceRequest, context_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return inputs by name, and request parameters."""
        model = self.model
        inputs: dict[str, Any] = {model.settings.text_input: self.prompt_text(request)}
        told = _sampling(request, context_tokens, greedy_by_top_k=model.greedy_by_top_k)
        spelled = {model.spelling[name]: value for name, value in told.items() if name in model.spelling}
        parameters: dict[str, Any] = {}
        if model.sampling_json:
            inputs[SAMPLING_JSON] = orjson.dumps(spelled).decode()
        else:
            for name, value in spelled.items():
                spec = model.inputs.get(name)
                if spec is not None:
                    inputs[name] = _fitting(spec, value)
                elif not isinstance(value, list):  # no server takes a list as a parameter
                    parameters[name] = value
        inputs.update({name: value for name, value in _ASKED.items() if name in model.inputs})
        streaming = model.endpoint == "generate_stream"
        inputs.update({name: streaming for name in _STREAMING if name in model.inputs})
        return inputs, parameters

    def parser(self, request: InferenceRequest, context_tokens: int, headers: Mapping[str, str]) -> KServeParser:
        """Return what reads the answer; see `router.upstream.codec.protocol.Codec`."""
        framed = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
        left = tokens_left(request)
        most = request.most_answer_tokens(context_tokens)
        echoed = self.prompt_text(request) if self.model.settings.echoes else ""
        return KServeParser(self.model, request.sampling.stop, left or most, echoed, framed=framed)

    def decode_error(self, status: int, headers: Mapping[str, str], body: bytes, who: str) -> OverspillError:
        """Turn a refusal into the error that the router understands."""
        told = _told(body) or f"HTTP {status}"
        message = f"{who}: {told}"
        if status in {401, 403}:
            return ReplicaFailed(f"{who} does not accept this tier's API key (HTTP {status}): {told}")
        if status in {429, 503}:
            kind = Shed if status == 429 else Unavailable
            return kind(message, retry_after_s=retry_after_s(headers))
        if status in {400, 413, 422} and _TOO_LONG.search(told):
            return ContextTooLong(message)
        if status == 404:
            return ModelNotFound(message) if self.triton else ReplicaFailed(f"{message}, is the base URL right?")
        if 400 <= status < 500 and status not in {408, 409, 425} and not self.triton:
            return InvalidRequest(message)
        return ReplicaFailed(message)


class KServeParser:
    """Reads one answer; see `router.upstream.codec.protocol.AnswerParser`.

    Args:
        most_tokens: an answer of so many was cut there.
        echoed: what it begins with and is not part of it.
        framed: HTTP tells the end of the body from a break of the connection.
    """

    def __init__(self, model: TextModel, stop: tuple[str, ...], most_tokens: int, echoed: str, *, framed: bool) -> None:
        self._model = model
        self._stop = StopCut(stop)
        self._most_tokens = most_tokens
        self._echoed = echoed
        self._framed = framed
        self._streams = model.endpoint == "generate_stream"
        self._rest = b""
        self._so_far = ""
        self._tokens = 0
        self._finish: FinishReason | None = None
        self._over = False

    def feed(self, data: bytes) -> list[Event]:
        self._rest += data
        events: list[Event] = []
        if self._streams:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and not self._over:
                    events += self._piece(line[5:])
        if len(self._rest) > _MAX_EVENT_BYTES and not self._over:
            self._over = True
            events.append(Event(error=f"an answer of more than {_MAX_EVENT_BYTES} bytes in one piece"))
        return events

    def end(self) -> list[Event]:
        if self._over:
            return []
        events = self._piece(self._rest.removeprefix(b"data:")) if self._rest.strip() or not self._streams else []
        if self._over:
            return events
        self._over = True
        if not self._framed:
            return [*events, Event(error="the connection was closed, which does not tell whether the answer is whole")]
        rest = self._stop.rest()
        if rest:
            events.append(Event.of(rest, self._tokens))
        concluded = FinishReason.LENGTH if self._tokens >= self._most_tokens else FinishReason.STOP
        return [*events, Event.of("", self._tokens, self._finish or concluded)]

    def _piece(self, payload: bytes) -> list[Event]:
        """Return what one JSON object of the server says."""
        try:
            told = orjson.loads(payload)
            if not isinstance(told, dict):
                raise TypeError  # noqa: TRY301 - one message for all that is no reply
            if told.get("error") is not None:
                return self._failed(str(told["error"])[:1000] or "no message")
            values = _outputs(told)
            text = _text(values, self._model.settings.text_output)
        except (orjson.JSONDecodeError, TypeError, KeyError, RecursionError):
            what = "an event" if self._streams else "a body"
            return self._failed(f"{what} without the output `{self._model.settings.text_output}`: {payload[:200]!r}")
        new = self._new(text)
        shown = self._stop.feed(new)
        self._count(values, shown if self._stop.found else new)
        reason = str(_first(values.get("finish_reason"))).lower()
        if reason in {"stop", "length", "eos", "eos_token", "stop_sequence"}:
            self._finish = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
        events = [Event.of(shown, self._tokens)] if shown else []
        if self._stop.found:
            self._over = True
            events.append(Event.of("", self._tokens, FinishReason.STOP, stop=self._stop.stop))
        return events

    def _failed(self, why: str) -> list[Event]:
        self._over = True
        return [Event(error=why)]

    def _new(self, text: str) -> str:
        """Return what of a piece was not there before."""
        if self._model.settings.accumulates:
            new = text.removeprefix(self._so_far)
            self._so_far = text
        else:
            new = text
        if self._echoed:
            new = new.removeprefix(self._echoed)
            self._echoed = ""
        return new

    def _count(self, values: Mapping[str, Any], text: str) -> None:
        """Count tokens: as told for this piece, else one for a piece of a stream, else by the size of the text."""
        told = _first(values.get("num_output_tokens"))
        left = self._most_tokens - self._tokens
        if type(told) is int and 0 <= told <= left:
            self._tokens += told
        elif self._streams:
            self._tokens += int(bool(text) and left > 0)
        else:
            self._tokens += min(estimate_size(TextPrompt(text)).tokens, max(left - 1, 1)) if text else 0


def _sampling(request: InferenceRequest, context_tokens: int, *, greedy_by_top_k: bool) -> dict[str, Any]:
    """Return the sampling parameters that have to be told: what differs from the defaults, and what servers assume."""
    sampling = request.sampling
    left = tokens_left(request)
    told: dict[str, Any] = {
        name: getattr(sampling, name)
        for name in SamplingParams.__struct_fields__
        if getattr(sampling, name) != getattr(_DEFAULT, name)
    }
    told["max_tokens"] = max(1, context_tokens - request.least_prompt_tokens) if left is None else left
    told["temperature"] = sampling.temperature
    if sampling.stop:
        told["stop"] = list(sampling.stop)
    if greedy_by_top_k:
        if sampling.temperature < GREEDY_BELOW:
            told["top_k"] = 1
            del told["temperature"]
        else:
            told["top_p"] = sampling.top_p  # neither of the two is greedy there
    return told


def _fitting(spec: TensorSpec, value: Any) -> Any:
    """Return a value as elements of an input: a list where that takes several, in the input's type."""
    if isinstance(value, list):
        several = bool(spec.shape) and spec.shape[-1] != 1
        return value if several else value[0]
    if spec.datatype == "BOOL":
        return bool(value)
    if spec.datatype.startswith("FP"):
        return float(value)
    return str(value) if spec.datatype == "BYTES" else value


def _tensor(spec: TensorSpec, value: Any) -> dict[str, object]:
    values = value if isinstance(value, list) else [value]
    return {"name": spec.name, "datatype": spec.datatype, "shape": [*spec.one[:-1], len(values)], "data": values}


def _outputs(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return outputs by name, from either form of a reply."""
    outputs = told.get("outputs")
    if not isinstance(outputs, list):
        return told
    return {str(output["name"]): output["data"] for output in outputs}


def _first(value: Any) -> Any:
    while isinstance(value, list):
        value = value[0] if value else None
    return value


def _text(values: Mapping[str, Any], name: str) -> str:
    text = _first(values[name])
    if not isinstance(text, str):
        raise TypeError(name)
    return text


def _told(body: bytes) -> str:
    """Return the message of an error, from JSON, from an event, or from plain text."""
    text = body.strip().removeprefix(b"data:").strip()
    try:
        told = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text[:200].decode("utf-8", "replace")
    error = told.get("error", told.get("detail", "")) if isinstance(told, dict) else ""
    return str(error)[:1000]
