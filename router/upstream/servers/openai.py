"""A server that speaks OpenAI's API, whoever made it: vLLM, SGLang, TGI, llama.cpp, Ollama, a hosted API.

Asked once what it is and what it serves, and at every poll how it is and what it has to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, final

import httpx
import msgspec
import structlog

from router.base.errors import in_words
from router.base.json_input import UNREADABLE
from router.upstream.codec.dialect import DIALECTS, PLAIN, dialect_of
from router.upstream.codec.refusals import retry_after_s
from router.upstream.exchange.call import UpstreamRequest
from router.upstream.http.handshake import HandshakeTrace
from router.upstream.http.probing import ProbeReply
from router.upstream.servers.abilities import media_told, tasks_of
from router.upstream.servers.exported_load import ExportedLoad, read_load
from router.upstream.servers.foreign import ForeignServer, Served, Surroundings
from router.upstream.servers.polled import ServerOptions
from router.upstream.servers.seen_slots import SeenSlots
from router.upstream.settings import BackendModel, BackendSettings
from router.values.feature import MEDIA, Feature
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.request import InferenceRequest
from router.values.status import ReplicaFacts
from router.values.task import GENERATES, Task
from router.wire.load import LoadReport, VariantLoad

log = structlog.get_logger("router.gateway")

_OLLAMA_CONTEXT_TOKENS = 4096  # what it runs a model with that says nothing else
_MOST_UNNAMED = 32  # models that are all taken where none is named
_LOADING_S = 5.0  # until it is ready, where nothing is known
_READY_PATHS = {"vllm": "/health", "sglang": "/health", "llama.cpp": "/health", "ollama": "/api/version"}
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class _Card(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[!-~]*$")]
    owned_by: Any = None
    max_model_len: Any = None


class _Cards(msgspec.Struct):
    data: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=1000)]


class _Generation(msgspec.Struct):
    n_ctx: _Tokens | None = None


class _Modalities(msgspec.Struct, frozen=True):
    vision: Any = None
    audio: Any = None


class _Props(msgspec.Struct):
    """`GET /props` of llama.cpp."""

    modalities: _Modalities = _Modalities()
    default_generation_settings: _Generation | None = None
    total_slots: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None


class _Show(msgspec.Struct):
    """`POST /api/show` of Ollama."""

    model_info: dict[str, Any] = {}
    parameters: str = ""
    capabilities: list[Any] = []

    @property
    def num_ctx(self) -> int | None:
        """The window that its model file sets."""
        for line in self.parameters.splitlines():
            name, _, value = line.strip().partition(" ")
            if name == "num_ctx" and value.strip().isdecimal():
                return _tokens(int(value))
        return None


class _Loaded(msgspec.Struct):
    name: str = ""
    context_length: Any = None


class _Running(msgspec.Struct):
    """`GET /api/ps` of Ollama."""

    models: list[_Loaded] = []


@final
class OpenAIServer(ForeignServer):
    """One server of kind `openai`; see `ForeignServer`."""

    def __init__(
        self, url: str, name: str, settings: BackendSettings, surroundings: Surroundings, options: ServerOptions
    ) -> None:
        super().__init__(url, name, settings, surroundings, options)
        self._dialect = PLAIN if settings.server == "auto" else DIALECTS[settings.server]
        self._known = settings.server != "auto"
        self._loading_since_s: float | None = None
        self._loading_took_s = _LOADING_S
        self._missing: list[str] = []
        self._exports = True
        self._seen = SeenSlots()
        self._fewer_told = False

    def expect(self, served: str, context_tokens: int, speeds: Mapping[str, SpeedPrior]) -> ReplicaInfo:
        """Return what a model will be, before the server has told of it; speeds known from before are not measured."""
        self._speeds.update(speeds)
        model = next((model for model in self._settings.models if model.served == served), BackendModel(served=served))
        return self._describe(self._served(served, context_tokens), model)

    def call(self, request: InferenceRequest, info: ReplicaInfo) -> UpstreamRequest:
        return UpstreamRequest(
            request=request,
            model=self._served_as.get(info.variant, info.variant),
            who=self.who,
            context_tokens=info.context_tokens,
            rtt_s=self.link.snapshot().rtt_s if info.remote else 0.0,
            dialect=self._dialect,
            local=not info.remote,
        )

    async def _probe(self) -> None:
        trace = HandshakeTrace(self.clock)
        began_s = self.clock.now_s()
        path = _READY_PATHS.get(self._dialect.name, "/v1/models")
        reply = await self._get(path, trace)
        ended_s = self.clock.now_s()
        self.link.observe_rtt(trace.handshake_s if trace.handshake_s is not None else ended_s - began_s)
        if reply.status_code == 503:
            self._reached(ready=False, why="its model is being loaded", back_in_s=self._loading(reply))
            return
        if reply.status_code in {401, 403}:
            raise httpx.HTTPError(f"it does not accept this tier's API key (HTTP {reply.status_code})")
        if reply.status_code != 200:
            raise httpx.HTTPError(f"GET {path}: HTTP {reply.status_code}, is this a server of OpenAI's API?")
        self._loaded()
        if self._due():
            await self._discover()
        if self._replicas:
            self._tell_load(await self._load(), began_s)
        self._reached(ready=True)

    def _loading(self, reply: ProbeReply) -> float:
        """Return in how many seconds it should be ready, by its own word or by how long it took the last time."""
        now_s = self.clock.now_s()
        if self._loading_since_s is None:
            self._loading_since_s = now_s
        left_s = self._loading_took_s - (now_s - self._loading_since_s)
        return retry_after_s(reply.headers, default_s=max(left_s, 1.0))

    def _loaded(self) -> None:
        if self._loading_since_s is not None:
            self._loading_took_s = self.clock.now_s() - self._loading_since_s
            self._loading_since_s = None

    # ── what it serves ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _discover(self) -> None:
        self._exports = True
        cards = _read_cards(await self._models())
        if not self._known and cards:
            self._known, self._dialect = True, dialect_of(str(cards[0].owned_by))
            log.info("backend is", backend=self.name, server=self._dialect.name, endpoint=self.endpoint)
        wanted = {model.served: model for model in self._settings.models}
        if not wanted and len(cards) > _MOST_UNNAMED:
            entry = self._settings.name
            raise httpx.HTTPError(f"it serves {len(cards)} models: name those to route to, `models` of backend {entry}")
        infos, does = [], await self._tasks()
        for card in cards:
            if not wanted or card.id in wanted:
                served = dataclasses.replace(await self._ask_about(card), does=does)
                infos.append(self._describe(served, wanted.get(card.id) or BackendModel(served=card.id)))
        missing = sorted(wanted.keys() - {card.id for card in cards})
        if missing and missing != self._missing:
            has = ", ".join(card.id for card in cards) or "nothing"
            log.warning("backend lacks models", backend=self.name, missing=missing, has=has)
        self._missing = missing
        self._publish(infos)

    async def _tasks(self) -> frozenset[Task]:
        """Return what its models do: a vLLM has the paths of that alone, and describes them, if it is let."""
        if self._dialect.name != "vllm":
            return GENERATES
        reply = await self._get("/openapi.json")
        try:
            return tasks_of(reply.content) if reply.status_code == 200 else GENERATES
        except UNREADABLE:  # a proxy's page, say: it serves all the same
            return GENERATES

    async def _ask_about(self, card: _Card) -> Served:
        """Return the window, slots and modalities of a model, as far as its server says them."""
        told = _tokens(card.max_model_len)
        if self._dialect.name == "llama.cpp":
            reply = await self._get("/props")
            props = msgspec.json.decode(reply.content, type=_Props) if reply.status_code == 200 else _Props()
            window = props.default_generation_settings.n_ctx if props.default_generation_settings else None
            media = media_told(props.modalities.vision, props.modalities.audio)
            return self._served(card.id, window or told, props.total_slots, media)
        if self._dialect.name == "ollama":
            window, media = await self._ollama_told(card.id)
            return self._served(card.id, window, media=media)
        return self._served(card.id, told)

    async def _ollama_told(self, name: str) -> tuple[int, frozenset[Feature]]:
        """Return the window that Ollama runs a model with, and what it takes beside text.

        It cuts longer prompts off without a word. The window is what it loaded the model with; for one that is not
        loaded, what its model file sets, or the default.
        """
        reply = await self._ask("POST", "/api/show", json={"model": name})
        show = msgspec.json.decode(reply.content, type=_Show) if reply.status_code == 200 else _Show()
        media = media_told("vision" in show.capabilities, "audio" in show.capabilities)
        reply = await self._get("/api/ps")
        if reply.status_code == 200:
            for loaded in msgspec.json.decode(reply.content, type=_Running).models:
                if loaded.name == name and (window := _tokens(loaded.context_length)):
                    return window, media
        lengths = [_tokens(value) for key, value in show.model_info.items() if key.endswith(".context_length")]
        most = min(filter(None, lengths), default=_OLLAMA_CONTEXT_TOKENS)
        return min(show.num_ctx or _OLLAMA_CONTEXT_TOKENS, most), media

    def _served(
        self,
        name: str,
        context_tokens: int | None,
        slots: int | None = None,
        media: frozenset[Feature] = MEDIA,  # a server that does not say refuses what its model does not take
    ) -> Served:
        return Served(name, context_tokens, slots, self._dialect.lacks, offers=self._dialect.offers | media)

    # ── what it has to do ───────────────────────────────────────────────────────────────────────────────────────────

    async def _load(self) -> ExportedLoad:
        if not self._exports:
            return ExportedLoad()
        try:
            reply = await self._get("/metrics")
        except httpx.HTTPError as error:  # it serves all the same
            log.debug("metrics unreadable", backend=self.name, why=in_words(error))
            return ExportedLoad()
        if reply.status_code != 200:
            self._exports = False  # until it is found again: not every server has it, or has it switched on
            return ExportedLoad()
        return read_load(reply.content.decode("utf-8", "replace"))

    def _tell_load(self, load: ExportedLoad, at_s: float) -> None:
        """Turn what the server exports into a report on its models, which share what they run on."""
        took_s = None if self._loading_took_s == _LOADING_S else round(self._loading_took_s, 1)
        self.facts = ReplicaFacts(kind=self._dialect.name, kv_usage=load.kv_usage, cold_start_s=took_s)
        names = [replica.info.variant for replica in self._replicas]
        self._seen.saw(load.running, load.waiting)
        share = 1 / len(names)
        loads = tuple(
            [
                VariantLoad(
                    name,
                    available=True,
                    slots=self._runs_at_once(name, load),
                    running=round((load.running or 0) * share),
                    queued=round((load.waiting or 0) * share),
                    kv_free_tokens=load.kv_free_tokens,
                )
                for name in names
            ]
        )
        self._report(LoadReport(loads), at_s, counts_ours=load.running is not None)

    def _runs_at_once(self, name: str, load: ExportedLoad) -> int:
        """Return the slots of a model: those told or configured, and of these no more than its server really has.

        What a server exports is of all its models: where it has several, nobody can tell whose requests wait.
        """
        slots = self._slots.get(name)
        if slots is None:
            return self._seen.slots
        if name not in self._declared or len(self._replicas) > 1:
            return slots
        seen = self._seen.of(slots)
        if seen < slots and not self._fewer_told:
            log.warning(
                "a backend runs fewer requests at once than its `slots` say, the rest wait inside it: lower `slots`",
                backend=self.name,
                model=name,
                slots=slots,
                seen=seen,
                waiting=load.waiting,
            )
        self._fewer_told = seen < slots
        return seen


def _read_cards(body: bytes) -> list[_Card]:
    """Read a list of model cards; one that cannot be read, or has a name that no header can carry, is left out.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: it is no such list.
    """
    cards = (_card(raw) for raw in msgspec.json.decode(body, type=_Cards).data)
    return [card for card in cards if card is not None]


def _card(raw: msgspec.Raw) -> _Card | None:
    try:
        return msgspec.json.decode(raw, type=_Card)
    except UNREADABLE as error:
        log.debug("model card unreadable", why=str(error))
        return None


def _tokens(told: Any) -> int | None:
    """Return a window that a server tells; None where it tells nothing that can be true."""
    return told if type(told) is int and 1 <= told < 2**31 else None
