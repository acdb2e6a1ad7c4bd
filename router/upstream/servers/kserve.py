"""A KServe V2 server that serves text models: Triton above all, and whatever else speaks the protocol.

Asked at every poll which of its models are ready, and what a Triton has to do; and when that changes, what its models
take, return and run at once. A model that is being loaded is unavailable until a time, and comes back by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Annotated, final
from urllib.parse import quote, urlsplit, urlunsplit

import httpx
import msgspec
import structlog

from router.base.build import user_agent
from router.base.errors import OverspillError
from router.base.json_input import UNREADABLE
from router.upstream.codec.kserve import KServeCodec
from router.upstream.codec.kserve_model import Metadata, TextModel, TritonConfig, text_model
from router.upstream.exchange.call import UpstreamRequest
from router.upstream.exchange.replica import Condition, UpstreamReplica
from router.upstream.http.handshake import HandshakeTrace
from router.upstream.http.probing import UNCOMPRESSED, ask
from router.upstream.servers.foreign import ForeignServer, Served, Surroundings
from router.upstream.servers.polled import ServerOptions
from router.upstream.servers.triton_load import TritonLoad, read_triton_load
from router.upstream.settings import BackendModel, BackendSettings
from router.values.feature import Feature
from router.values.replica import ReplicaInfo
from router.values.request import InferenceRequest
from router.values.status import ReplicaFacts
from router.values.template import Render
from router.wire.load import LoadReport, VariantLoad

log = structlog.get_logger("router.gateway")

_ASSUMED_SLOTS = 64
_METRICS_S = 0.5  # no more of a poll's time: a port that drops packets is not there
_FIRST_LOADING_S = 10.0  # a model takes to load, where none was seen to
_LEAST_LOADING_S = 1.0
_READY, _LOADING = "READY", "LOADING"
_NO_INDEX = {401, 403, 404, 405, 501}  # it has none, or does not show it


class _Server(msgspec.Struct):
    """`GET /v2`."""

    name: str = ""
    extensions: list[str] = []

    @property
    def is_triton(self) -> bool:
        return self.name.lower() == "triton"

    @property
    def configures(self) -> bool:
        """Whether it tells of its models as Triton does, and generates as that does."""
        return self.is_triton or "generate" in self.extensions


class _Listed(msgspec.Struct):
    """An entry of `POST /v2/repository/index`."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[!-~]*$")]
    state: str = _READY
    reason: str = ""
    variants: list[str] = []
    """A tier of ours lists families too, each with its variants: entries of their own."""


_index_decoder = msgspec.json.Decoder(Annotated[list[_Listed], msgspec.Meta(max_length=10_000)])


@final
class KServeServer(ForeignServer):
    """One server of kind `kserve`; see `ForeignServer`. A model whose chat template is not known takes completions."""

    def __init__(
        self, url: str, name: str, settings: BackendSettings, surroundings: Surroundings, options: ServerOptions
    ) -> None:
        super().__init__(url, name, settings, surroundings, options)
        self._triton = self._configures = False
        self._indexes = True
        self._exports = False
        self._metrics_url = _metrics_url(self.endpoint, settings.kserve.metrics_url)
        self._ready: frozenset[str] = frozenset()
        self._codecs: dict[str, KServeCodec] = {}
        self._loading_since_s: dict[str, float] = {}
        self._loading_took_s: dict[str, float] = {}
        self._told_of: set[str] = set()

    async def __aenter__(self) -> KServeServer:
        # Metrics may be elsewhere: no key goes there, and one that hangs takes nothing from the probes.
        self._metrics_client = httpx.AsyncClient(
            headers={"user-agent": user_agent(), **UNCOMPRESSED},
            verify=self._context,
            trust_env=False,
            timeout=_METRICS_S,
        )
        await super().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        await self._metrics_client.aclose()

    def call(self, request: InferenceRequest, info: ReplicaInfo) -> UpstreamRequest:
        codec = self._codecs[info.variant]
        return UpstreamRequest(
            request=request,
            model=codec.model.name,
            who=self.who,
            context_tokens=info.context_tokens,
            rtt_s=self.link.snapshot().rtt_s if info.remote else 0.0,
            local=not info.remote,
            codec=codec,
        )

    async def _probe(self) -> None:
        trace = HandshakeTrace(self.clock)
        began_s = self.clock.now_s()
        reply = await self._get("/v2/health/ready", trace)
        ended_s = self.clock.now_s()
        self.link.observe_rtt(trace.handshake_s if trace.handshake_s is not None else ended_s - began_s)
        if reply.status_code in {401, 403}:
            raise httpx.HTTPError(f"it does not accept this tier's API key (HTTP {reply.status_code})")
        if reply.status_code not in {200, 400, 503}:
            raise httpx.HTTPError(f"GET /v2/health/ready: HTTP {reply.status_code}, is this a KServe V2 server?")
        states = await self._states(ready=reply.status_code == 200)
        ready = frozenset(name for name, state in states.items() if state.state == _READY)
        if self._due(changed=ready != self._ready):
            await self._discover(states, ready)
            self._ready = ready
        self._mark(states)
        if self._replicas:
            await self._tell_load(began_s)
        self._conclude(states, ready)

    # ── which models are ready ──────────────────────────────────────────────────────────────────────────────────────

    async def _states(self, *, ready: bool) -> Mapping[str, _Listed]:
        """Return the models of interest by name, each with its best version's state.

        Args:
            ready: what the server says of itself; a Triton says no while any of its models is not ready.
        """
        wanted = [model.served for model in self._settings.models]
        if self._indexes:
            reply = await self._ask("POST", "/v2/repository/index", json={})
            if reply.status_code == 200:
                found: dict[str, _Listed] = {}
                for entry in _index_decoder.decode(reply.content):
                    asked = entry.name in wanted if wanted else not entry.variants
                    if asked and getattr(found.get(entry.name), "state", "") != _READY:
                        found[entry.name] = entry
                return found
            if reply.status_code not in _NO_INDEX:
                raise httpx.HTTPError(f"POST /v2/repository/index: HTTP {reply.status_code}")
            self._indexes = False
        if not wanted:
            raise httpx.HTTPError(
                "it lists no models (POST /v2/repository/index): name those to route to in [[backends.models]]"
            )
        return {name: await self._state(name) for name in wanted} if ready else {n: _Listed(n, "") for n in wanted}

    async def _state(self, name: str) -> _Listed:
        reply = await self._get(f"/v2/models/{quote(name, safe='')}/ready")
        return _Listed(name, _READY if reply.status_code == 200 else "UNAVAILABLE")

    def _mark(self, states: Mapping[str, _Listed]) -> None:
        """Note for each replica whether its model is ready, and if not, when it should be."""
        for replica in self._replicas:
            name = self._codecs[replica.info.variant].model.name
            replica.unready = self._unready(name, states.get(name))

    def _unready(self, name: str, entry: _Listed | None) -> Condition | None:
        now_s = self.clock.now_s()
        if entry is not None and entry.state == _READY:
            if name in self._loading_since_s:
                self._loading_took_s[name] = now_s - self._loading_since_s.pop(name)
            return None
        if entry is None or entry.state != _LOADING:
            self._loading_since_s.pop(name, None)
            reason = f": {entry.reason[:200]}" if entry is not None and entry.reason else ""
            return Condition(reachable=True, why=f"{name} is not loaded there{reason}")
        since_s = self._loading_since_s.setdefault(name, now_s)
        left_s = self._loading_took_s.get(name, _FIRST_LOADING_S) - (now_s - since_s)
        return Condition(reachable=True, why=f"{name} is being loaded", back_in_s=max(left_s, _LEAST_LOADING_S))

    def _conclude(self, states: Mapping[str, _Listed], ready: frozenset[str]) -> None:
        """Say whether the server can be used: where a text model of it is ready."""
        if ready and self._measuring is not None and not self._replicas:
            self._reached(ready=False, why="its speed is being measured", back_in_s=_LEAST_LOADING_S)
            return
        if ready:
            self._reached(ready=True)
            return
        conditions = [found for name, entry in states.items() if (found := self._unready(name, entry)) is not None]
        soonest = min((c for c in conditions if c.back_in_s), key=lambda c: c.back_in_s, default=None)
        known = soonest or next(iter(conditions), Condition(why="it serves no model"))
        self._reached(ready=False, why=known.why, back_in_s=known.back_in_s)

    # ── what they take and return ───────────────────────────────────────────────────────────────────────────────────

    async def _discover(self, states: Mapping[str, _Listed], ready: frozenset[str]) -> None:
        reply = await self._get("/v2")
        told = msgspec.json.decode(reply.content, type=_Server) if reply.status_code == 200 else _Server()
        self._triton, self._configures = told.is_triton, told.configures
        self._exports = self._triton and bool(self._metrics_url)
        self.facts = ReplicaFacts(kind="triton" if self._triton else "kserve")
        known = {model.served: model for model in self._settings.models}
        found = {codec.model.name: codec for codec in self._codecs.values()}  # one that is being loaded stays known
        infos = [replica.info for replica in self._replicas if self._served(replica) in states.keys() - ready]
        for name in sorted(ready):
            model = known.get(name) or BackendModel(served=name)
            text = await self._ask_about(name)
            if text is not None:
                infos.append(await self._text_info(text, model, found.get(name)))
            elif name not in self._told_of:
                self._told_of.add(name)
                log.info("no text model", backend=self.name, model=name, wants=_tensors(self._settings))
        if infos or self._replicas or not self._awaited(states):
            self._publish(infos)

    def _awaited(self, states: Mapping[str, _Listed]) -> list[str]:
        """Return the models that are not ready and shall be: those that are configured, and those being loaded."""
        wanted = bool(self._settings.models)
        return [name for name, entry in states.items() if entry.state != _READY and (wanted or entry.state == _LOADING)]

    def _served(self, replica: UpstreamReplica) -> str:
        return self._codecs[replica.info.variant].model.name

    async def _ask_about(self, name: str) -> TextModel | None:
        """Return what a model takes and returns; None if that is no text, or nothing that can be read."""
        reply = await self._get(f"/v2/models/{quote(name, safe='')}")
        if reply.status_code != 200:  # unloaded since it was listed
            return None
        try:
            metadata = msgspec.json.decode(reply.content, type=Metadata)
            config = await self._config(name) if self._configures else None
            streams = config is not None and config.decoupled
            for step in config.steps if config is not None else ():  # an ensemble streams where one of its steps does
                streams = streams or (await self._config(step)).decoupled
        except UNREADABLE as error:
            log.debug("model unreadable", backend=self.name, model=name, why=str(error))
            return None
        return text_model(name, metadata, config, self._settings.kserve, streams=streams)

    async def _config(self, name: str) -> TritonConfig:
        reply = await self._get(f"/v2/models/{quote(name, safe='')}/config")
        return msgspec.json.decode(reply.content, type=TritonConfig) if reply.status_code == 200 else TritonConfig()

    async def _text_info(self, text: TextModel, model: BackendModel, known: KServeCodec | None) -> ReplicaInfo:
        variant, place = self._place_of(text.name, model)
        render = known.render if known is not None else await self._template(place.family, model)
        self._codecs[variant] = KServeCodec(text, render, triton=self._triton)
        chat = {Feature.CHAT, Feature.CONTINUED_CHAT} if render is None else set()
        slots, device = text.slots or _ASSUMED_SLOTS, f"{self.endpoint}/{text.name}"
        return self._describe(Served(text.name, text.context_tokens, slots, text.lacks | chat, device), model)

    async def _template(self, family: str, model: BackendModel) -> Render | None:
        try:
            return await asyncio.to_thread(self._surroundings.renderers, family, model.chat_template)
        except OverspillError as error:
            log.warning("chat template unusable", backend=self.name, model=model.served, why=error.message)
            return None

    def _has_measured(self) -> None:
        if self.condition.reachable:
            self._reached(ready=True)

    # ── what it has to do ───────────────────────────────────────────────────────────────────────────────────────────

    async def _tell_load(self, at_s: float) -> None:
        load = await self._load()
        share = 1 / len(self._replicas)
        for replica in self._replicas:
            variant = replica.info.variant
            slots, counts_ours = self._slots[variant], load.running is not None
            if load.running is not None:
                running, queued = round(load.running * share), round((load.waiting or 0) * share)
            else:  # what waits and is not ours
                pending = load.pending.get(self._served(replica), 0)
                running, queued = 0, max(0, pending - max(0, replica.in_flight(at_s) - slots))
            told = VariantLoad(
                variant,
                available=True,
                slots=slots,
                running=running,
                queued=queued,
                kv_free_tokens=load.kv_free_tokens,
            )
            replica.report(LoadReport((told,)), at_s, counts_ours=counts_ours)

    async def _load(self) -> TritonLoad:
        try:
            reply = await ask(self._metrics_client, "GET", self._metrics_url) if self._exports else None
        except httpx.HTTPError as error:
            reply = None
            if self._metrics_url not in self._told_of:
                self._told_of.add(self._metrics_url)
                log.info("no metrics", backend=self.name, url=self._metrics_url, why=str(error) or type(error).__name__)
        if reply is None or reply.status_code != 200:
            self._exports = False  # until it is discovered again
            return TritonLoad({})
        return read_triton_load(reply.content.decode("utf-8", "replace"))


def _metrics_url(base_url: str, configured: str) -> str:
    """Return where the metrics are; a port and path stand for the server's own host."""
    if not configured.startswith(":"):
        return configured
    parts = urlsplit(base_url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port, _, path = configured[1:].partition("/")
    return urlunsplit((parts.scheme, f"{host}:{port}", f"/{path}", "", ""))


def _tensors(settings: BackendSettings) -> str:
    return f"{settings.kserve.text_input} → {settings.kserve.text_output}"
