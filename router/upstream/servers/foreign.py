"""A server of another maker, whatever it speaks: its models described, and measured before they serve.

What a server does not say of a model is configured, measured or, last, assumed; each figure says which.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import structlog

from router.base.clock import Clock
from router.base.errors import InvalidRequest, OverspillError
from router.base.timers import end, within
from router.signals.link import Link
from router.upstream.exchange.replica import UpstreamReplica
from router.upstream.servers.lessons import Lessons, teaches
from router.upstream.servers.polled import PolledServer, ServerOptions
from router.upstream.servers.speed import measure_speed
from router.upstream.settings import BackendModel, BackendSettings
from router.upstream.source import SourceHooks
from router.values.feature import MEDIA, NOTHING, Feature
from router.values.prompt import ChatPrompt
from router.values.replica import Place, ReplicaInfo, SpeedPrior
from router.values.request import InferenceRequest
from router.values.task import GENERATES, Task
from router.values.template import Renderers, no_renderers

log = structlog.get_logger("router.gateway")

_ASSUMED = SpeedPrior(500.0, 30.0, source="assumed: neither configured nor measured")
_ASSUMED_CONTEXT_TOKENS = 4096
_OF_COMPLETIONS = frozenset({Feature.COMPLETIONS, Feature.PROMPT_IDS, Feature.CONTINUED_IDS})
_WARM_UP_S = 120.0  # measuring may take so long; a server may load its model meanwhile

Places = Callable[[str], Place | None]
"""From a model's name, as its server or the configuration says it, to its place; None if it is unknown."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a tier lends to every server behind it.

    Attributes:
        places: asked where the servers' models stand.
        renderers: asked for the chat templates of models whose servers take text alone.
        tier: where this tier runs, and so a `local` server's models.
    """

    clock: Clock
    hooks: SourceHooks
    places: Places
    renderers: Renderers = no_renderers
    tier: str = "edge"


@dataclass(frozen=True, slots=True)
class Served:
    """A model of a server: its name there, and what is known of it here.

    Attributes:
        context_tokens, slots: as its server says; None where it does not.
        lacks: what requests may need and it does not do.
        device: what it computes on, where the configuration does not say.
        does: its tasks, where neither the configuration nor its server says otherwise.
        offers: of what only some servers do, what it does; images and sounds, where the configuration does not say.
    """

    name: str
    context_tokens: int | None = None
    slots: int | None = None
    lacks: frozenset[Feature] = frozenset()
    device: str = ""
    does: frozenset[Task] = GENERATES
    offers: frozenset[Feature] = NOTHING


class ForeignServer(PolledServer):
    """One server of a `[[backends]]` entry.

    Args:
        name: of its replicas: the backend's, with the address where there are several.
    """

    def __init__(
        self, url: str, name: str, settings: BackendSettings, surroundings: Surroundings, options: ServerOptions
    ) -> None:
        clock = surroundings.clock
        link = Link(url, clock=clock)
        super().__init__(url, link=link, clock=clock, options=options, hooks=surroundings.hooks, name=name)
        self._settings = settings
        self._surroundings = surroundings
        self._slots: dict[str, int] = {}
        self._declared: set[str] = set()  # variants whose slots an operator has configured
        self._speeds: dict[str, SpeedPrior] = {}
        self._measuring: asyncio.Task[None] | None = None
        self._served_as: dict[str, str] = {}
        self._lessons = Lessons(clock)
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end(*filter(None, [self._measuring, *self._asking.values()]))
        await super().__aexit__(kind, error, trace)

    def refused(self, info: ReplicaInfo, request: InferenceRequest, error: InvalidRequest) -> None:
        """Ask whether a model does not do at all what its refusal speaks of: images, sounds, raw completions."""
        used = request.wants & MEDIA & info.offers
        if not isinstance(request.prompt, ChatPrompt):
            used |= {Feature.COMPLETIONS} - info.lacks
        doubted = frozenset(feature for feature in used if teaches(feature, error))
        if doubted and self._lessons.may_ask(info.variant):
            self._ask_for(info, doubted)

    def _ask_for(self, info: ReplicaInfo, features: frozenset[Feature]) -> None:
        if info.variant not in self._asking:
            self._asking[info.variant] = asyncio.create_task(
                self._asked_for(info, features), name=f"ask {self.name} what it does"
            )

    async def _asked_for(self, info: ReplicaInfo, features: frozenset[Feature]) -> None:
        """Ask a model what it does, and let the router know where that is something else than before."""
        before = self._lessons.refuses(info.variant)
        try:
            await within(_WARM_UP_S, self._lessons.ask(UpstreamReplica(info, self), features))
        except (OverspillError, asyncio.TimeoutError) as error:
            log.info("backend does not say what it takes", backend=self.name, model=info.variant, why=str(error))
        except Exception:  # the task boundary
            log.exception("asking a backend crashed", backend=self.name, model=info.variant)
        finally:
            del self._asking[info.variant]
        after = self._lessons.refuses(info.variant)
        if after == before:
            return
        refused = sorted(feature.value for feature in after)
        log.info("backend takes", backend=self.name, model=info.variant, refuses=refused or "nothing")
        self._take(
            [
                dataclasses.replace(
                    known,
                    offers=(known.offers | before & MEDIA) - after,
                    lacks=(known.lacks - _by_page(before)) | _by_page(after),
                )
                if known.variant == info.variant
                else known
                for known in (replica.info for replica in self._replicas)
            ]
        )

    def _place_of(self, served: str, model: BackendModel) -> tuple[str, Place]:
        """Return what a model is called here, and where it stands."""
        variant, places = model.variant or _short(served), self._surroundings.places
        return variant, places(variant) or places(served) or Place(variant)

    def _describe(self, served: Served, model: BackendModel) -> ReplicaInfo:
        """Return a model as the router shall see it."""
        settings = self._settings
        variant, place = self._place_of(served.name, model)
        window = model.context_tokens or served.context_tokens
        if window is None:
            window = _ASSUMED_CONTEXT_TOKENS
            if variant not in self._served_as:
                log.warning("window unknown", backend=self.name, model=served.name, assumed_tokens=window)
        self._served_as[variant] = served.name
        slots = model.slots or served.slots
        if slots is not None:
            self._slots[variant] = slots
        if model.slots is not None:
            self._declared.add(variant)
        tasks = model.does or served.does
        offers = served.offers if model.takes is None else served.offers - MEDIA | model.takes
        refused = self._lessons.refuses(variant)
        decode = model.decode_tokens_per_s or (None if Task.GENERATE in tasks else _ASSUMED.decode_tokens_per_s)
        if model.prefill_tokens_per_s and decode:
            self._speeds.setdefault(variant, SpeedPrior(model.prefill_tokens_per_s, decode, source="configured"))
        return ReplicaInfo(
            replica_id=f"{self.name}/{variant}",
            endpoint=self.endpoint,
            tier=self._surroundings.tier if settings.local else "cloud",
            remote=not settings.local,
            family=model.family or place.family,
            variant=variant,
            rung=place.rung if model.rung is None else model.rung,
            quality=place.quality if model.quality is None else model.quality,
            context_tokens=window,
            prior=self._speeds.get(variant, _ASSUMED),
            device=settings.device or served.device or self.endpoint,
            backend=settings.name,
            lacks=served.lacks | _by_page(refused),
            version=settings.version,
            tasks=tasks,
            offers=offers - refused,
        )

    def _publish(self, infos: Sequence[ReplicaInfo]) -> None:
        """Let the router know the models: at once, or when those of which no speed is known were measured."""
        for info in infos:
            if again := self._lessons.due(info.variant):
                self._ask_for(info, again)
        measured = [info for info in infos if self._settings.warm_up and Task.GENERATE in info.tasks]
        slow = [info for info in measured if info.variant not in self._speeds]
        if not slow:
            self._take(list(infos))
        elif self._measuring is None:
            self._measuring = asyncio.create_task(self._measure(infos, slow), name=f"warm up {self.name}")

    async def _measure(self, infos: Sequence[ReplicaInfo], slow: Sequence[ReplicaInfo]) -> None:
        """Measure the speed of models one after the other, and then let the router know all of them."""
        for info in slow:
            try:
                speed = await within(_WARM_UP_S, measure_speed(UpstreamReplica(info, self), self.clock))
            except (OverspillError, asyncio.TimeoutError) as error:
                why = str(error) or f"it took more than {_WARM_UP_S:g} s"
                log.warning("warm-up failed", backend=self.name, model=info.variant, why=why)
                speed = _ASSUMED
            except Exception:  # the task boundary: without a speed it would never serve
                log.exception("warm-up crashed", backend=self.name, model=info.variant)
                speed = _ASSUMED
            self._speeds[info.variant] = speed
        self._measuring = None
        self._has_measured()
        self._take([dataclasses.replace(info, prior=self._speeds.get(info.variant, info.prior)) for info in infos])

    def _has_measured(self) -> None:
        """Hear that all speeds are known, before the router does."""


def _by_page(refused: frozenset[Feature]) -> frozenset[Feature]:
    """Return what a server lacks whose page of completions is not there."""
    return _OF_COMPLETIONS if Feature.COMPLETIONS in refused else NOTHING


def _short(served: str) -> str:
    """Return a model's name: llama.cpp calls one by the path of its file, which is nobody's business."""
    return served.replace("\\", "/").rpartition("/")[2] if served.endswith(".gguf") else served
