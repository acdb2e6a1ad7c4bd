"""Rerank, score, audio: bodies that a server behind this tier takes as they are, but for the model's name.

What a tier has to know of a call is checked here: the model, and how much there is to do. Everything else is the
server's, which says itself what it does not take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import orjson
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.base.json_input import UNREADABLE
from router.values.request import ApiRequest
from router.values.sampling import SamplingParams
from router.values.task import PassedCall, Task
from router.wire.body import decode_json
from router.wire.multipart import read_form
from router.wire.names import refuse_fields
from router.wire.openai.media import silent_wav

JSON = "application/json"
MAX_DOCUMENTS = 4096
"""Of one rerank or score call."""

RERANK_PATH = "/v1/rerank"
SCORE_PATH = "/v1/score"
SPEECH_PATH = "/v1/audio/speech"
TOKENIZER_PATH = "/tokenizer_info"
SOUND_PATHS = {Task.TRANSCRIBE: "/v1/audio/transcriptions", Task.TRANSLATE: "/v1/audio/translations"}

ONE_PIECE = SamplingParams(max_tokens=1)
"""A call's answer counts as one token."""
_Model = Annotated[str, Meta(min_length=1, max_length=256)]
_Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Document = str | dict[str, Any]
_LINK = re.compile(r"[\s\x00-\x20]*(?!data:)[a-z][a-z0-9+.\-\t\r\n]*:[\t\r\n]*[\\/]", re.IGNORECASE | re.ASCII)
"""An address with all that programs leave out where they read one, as WHATWG's standard says."""
_LINK_FIELDS = frozenset({"url", "audio_url"})


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/rerank, as Jina, Cohere and vLLM have it.

    Attributes:
        top_n: how many of the documents are wanted, the best ones.
        priority: higher is better, as in `x-overspill-priority`.
    """

    model: _Model
    query: _Document
    documents: list[_Document]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    priority: _Priority | None = None


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/score, as vLLM has it under three names: how near each of some texts is to each of others."""

    model: _Model
    text_1: str | list[Any] | dict[str, Any] | None = None
    text_2: str | list[Any] | dict[str, Any] | None = None
    queries: str | list[Any] | dict[str, Any] | None = None
    documents: str | list[Any] | dict[str, Any] | None = None
    items: str | list[Any] | dict[str, Any] | None = None
    data_1: str | list[Any] | dict[str, Any] | None = None
    data_2: str | list[Any] | dict[str, Any] | None = None
    priority: _Priority | None = None


class SpeechBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/audio/speech."""

    model: _Model
    input: Annotated[str, Meta(min_length=1, max_length=65_536)]
    voice: str | dict[str, Any] | None = None
    response_format: str | None = None
    speed: float | None = None
    priority: _Priority | None = None


_rerank_decoder = msgspec.json.Decoder(RerankBody)
_score_decoder = msgspec.json.Decoder(ScoreBody)
_speech_decoder = msgspec.json.Decoder(SpeechBody)


def decode_rerank(body: bytes) -> ApiRequest:
    """Decode the body of /v1/rerank.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_rerank_decoder, body)
    if not raw.documents:
        raise InvalidRequest("`documents` is empty: send at least one", param="documents")
    _bounded("documents", raw.documents)
    query = _size(raw.query)
    inputs = tuple(query + _size(document) for document in raw.documents)
    return _request(raw, body, PassedCall(Task.RERANK, RERANK_PATH, JSON, b"", b"", inputs))


def decode_score(body: bytes) -> ApiRequest:
    """Decode the body of /v1/score.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_score_decoder, body)
    left, right = _texts(raw, "text_1", "queries", "data_1"), _texts(raw, "text_2", "documents", "items", "data_2")
    if 1 not in {len(left), len(right)} and len(left) != len(right):
        raise InvalidRequest(
            f"`text_1` has {len(left)} texts and `text_2` has {len(right)}: send one of the first, or as many of both",
            param="text_1",
        )
    pairs = max(len(left), len(right))
    one, other = ([*map(_size, side)] * (pairs if len(side) == 1 else 1) for side in (left, right))
    inputs = tuple(a + b for a, b in zip(one, other, strict=True))
    return _request(raw, body, PassedCall(Task.SCORE, SCORE_PATH, JSON, b"", b"", inputs))


def decode_speech(body: bytes) -> ApiRequest:
    """Decode the body of /v1/audio/speech.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_speech_decoder, body)
    call = PassedCall(Task.SPEAK, SPEECH_PATH, JSON, b"", b"", (len(raw.input.encode("utf-8", "replace")),), True)
    return _request(raw, body, call)


def decode_sound(body: bytes, content_type: str, task: Task) -> ApiRequest:
    """Decode the form of /v1/audio/transcriptions or /v1/audio/translations.

    Raises:
        InvalidRequest: naming the part at fault.
    """
    form = read_form(body, content_type)
    model = form.fields.get("model")
    if model is None or not 1 <= len(model.value) <= 256 or body[model.start : model.end] != model.value.encode():
        raise InvalidRequest("`model`: the form has no part with a model's name", param="model")
    if "model" in form.repeated:  # servers differ in which of them they take
        raise InvalidRequest("`model`: the form has more than one part of that name: send one", param="model")
    if not form.files.get("file"):
        raise InvalidRequest("`file`: the form has no sound: send it as a part with a file's name", param="file")
    streams = form.fields["stream"].value.lower() in {"true", "1"} if "stream" in form.fields else False
    before, after = body[: model.start], body[model.end :]
    links = tuple(
        value for name, value in form.values if name != "prompt" and (name in _LINK_FIELDS or _is_link(value))
    )
    call = PassedCall(task, SOUND_PATHS[task], content_type, before, after, streams=streams, links=links)
    return ApiRequest(model.value, call, ONE_PIECE)


def _request(raw: RerankBody | ScoreBody | SpeechBody, body: bytes, call: PassedCall) -> ApiRequest:
    refuse_fields(body, frozenset(type(raw).__struct_fields__))
    return ApiRequest(raw.model, _around_model(call, body), ONE_PIECE, priority=raw.priority)


def _around_model(call: PassedCall, body: bytes) -> PassedCall:
    """Put a JSON body around the name of its model; a priority goes as a header, since servers count them otherwise.

    Raises:
        InvalidRequest: a field that is not read here holds what is no JSON, or nests too deeply.
    """
    try:
        fields = {name: value for name, value in orjson.loads(body).items() if name not in {"model", "priority"}}
        links = tuple(_links_in(fields.values()))
        return replace(call, before=b'{"model":', after=b"," + orjson.dumps(fields)[1:], links=links)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the request body cannot be passed on: {error}") from None


def _links_in(fields: Iterable[object]) -> Iterator[str]:
    """Find what servers may take for a link to fetch: an address as an element of an object, but where a text is from.

    That is told beside the text of a document, and nowhere deeper: there a text could stand beside any link.
    """
    documents = [one for field in fields for one in (field if isinstance(field, list) else [field])]
    values: list[object] = []
    for document in documents:
        if isinstance(document, dict):
            own = {"text", "title", "url"} if isinstance(document.get("text"), str) else {"title"}
            values.append({name: one for name, one in document.items() if name not in own or not isinstance(one, str)})
        else:
            values.append(document)
    while values:
        value = values.pop()
        if isinstance(value, list):
            values.extend(one for one in value if isinstance(one, (dict, list)))
        elif isinstance(value, dict):
            values.extend(one for one in value.values() if isinstance(one, (dict, list)))
            yield from (one for one in value.values() if isinstance(one, str) and _is_link(one))


def _is_link(text: str) -> bool:
    return _LINK.match(text.lstrip()) is not None


def _texts(raw: ScoreBody, *names: str) -> list[Any]:
    name = next((name for name in names if getattr(raw, name) is not None), names[0])
    given = getattr(raw, name)
    if given is None or given == []:
        raise InvalidRequest(f"`{name}` is missing or empty: send a text, or a list of them", param=name)
    found = given if isinstance(given, list) else [given]
    _bounded(name, found)
    return found


def _bounded(name: str, found: Sequence[object]) -> None:
    if len(found) > MAX_DOCUMENTS:
        raise InvalidRequest(
            f"`{name}` has {len(found)} elements, at most {MAX_DOCUMENTS} are taken at once: send several requests",
            param=name,
        )


def _size(document: object) -> int:
    text = document if isinstance(document, str) else msgspec.json.encode(document).decode()
    return len(text.encode("utf-8", "replace"))


def token_call(path: str, body: bytes) -> PassedCall:
    """Return a call of /tokenize or /detokenize whose body was checked."""
    return _around_model(PassedCall(Task.TOKENIZE, path, JSON, b"", b"", (len(body),)), body)


def tokenizer_call() -> PassedCall:
    """Return the question what the tokenizer of a model is."""
    return PassedCall(Task.TOKENIZE, TOKENIZER_PATH, JSON, b"", b"", method="GET")


def path_of(call: PassedCall, model: str) -> str:
    """Return where a call is put; without a body, the query says which model is meant."""
    return call.path if call.method == "POST" else f"{call.path}?model={quote(model, safe='')}"


def named(call: PassedCall, model: str) -> bytes:
    """Return the body of a call, with the name that its server knows the model by."""
    if call.method != "POST":
        return b""
    name = orjson.dumps(model) if call.media_type == JSON else model.encode()
    return b"".join((call.before, name, call.after))


# ── replies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Ranked(msgspec.Struct):
    index: Annotated[int, Meta(ge=0)]
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Ranked]


class _Score(msgspec.Struct):
    index: Annotated[int, Meta(ge=0)]
    score: float


class _Scores(msgspec.Struct):
    data: list[_Score]


class _Usage(msgspec.Struct):
    prompt_tokens: Any = None
    input_tokens: Any = None
    total_tokens: Any = None


class _Used(msgspec.Struct):
    usage: _Usage | None = None


_SHAPES: dict[Task, Callable[[bytes], _Ranking | _Scores]] = {
    Task.RERANK: msgspec.json.Decoder(_Ranking).decode,
    Task.SCORE: msgspec.json.Decoder(_Scores).decode,
}
_used = msgspec.json.Decoder(_Used)


def fault_of(call: PassedCall, reply: bytes) -> str:
    """Say what a reply lacks to be an answer to `call`; empty where nothing does."""
    if call.task not in _SHAPES:
        return ""
    try:
        found = _SHAPES[call.task](reply)
    except UNREADABLE as error:
        return f"no {call.task.value} reply: {error}"
    places = [one.index for one in (found.results if isinstance(found, _Ranking) else found.data)]
    if not places or len(set(places)) != len(places) or max(places) >= len(call.inputs):
        return f"a {call.task.value} reply of other texts than the {len(call.inputs)} that were sent"
    return ""


def told_tokens(reply: bytes, media_type: str) -> int | None:
    """Return how many tokens of input a server says there were; None where it says nothing that can be true."""
    if not media_type.startswith(JSON):
        return None
    try:
        usage = _used.decode(reply).usage
    except UNREADABLE:
        return None
    if usage is None:
        return None
    for told in (usage.prompt_tokens, usage.input_tokens, usage.total_tokens):
        if type(told) is int and 1 <= told < 2**31:
            return told
    return None


def renamed(reply: bytes, media_type: str, model: str) -> bytes:
    """Return a JSON reply that names its model with what that is called here; any other as it is."""
    if not media_type.startswith(JSON):
        return reply
    try:
        told = orjson.loads(reply)
    except ValueError:
        return reply
    if not isinstance(told, dict) or "model" not in told:
        return reply
    return orjson.dumps({**told, "model": model})


# ── self-tests ──────────────────────────────────────────────────────────────────────────────────────────────────────

_BOUNDARY = b"overspill-self-test"
_SHORTEST: dict[Task, dict[str, object]] = {
    Task.RERANK: {"query": "Hello", "documents": ["Hello"]},
    Task.SCORE: {"text_1": "Hello", "text_2": "Hello"},
    Task.SPEAK: {"input": "Hello", "voice": "alloy"},
}


def shortest_like(call: PassedCall) -> PassedCall:
    """Return a call of the same kind that asks for the least: one word, or a tenth of a second of silence."""
    fields = _SHORTEST.get(call.task)
    if fields is not None and call.media_type == JSON:
        after = b"," + orjson.dumps(fields)[1:]
        return PassedCall(call.task, call.path, JSON, b'{"model":', after, (10,), call.streams)
    if call.task in SOUND_PATHS:
        line = b'--%b\r\nContent-Disposition: form-data; name="' % _BOUNDARY
        file = b'\r\n%bfile"; filename="silence.wav"\r\nContent-Type: audio/wav\r\n\r\n%b' % (line, silent_wav(1600))
        media_type = f"multipart/form-data; boundary={_BOUNDARY.decode()}"
        return PassedCall(
            call.task, call.path, media_type, line + b'model"\r\n\r\n', file + b"\r\n--%b--\r\n" % _BOUNDARY
        )
    return call
