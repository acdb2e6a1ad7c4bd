"""What a tier hands to its gateway."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from prometheus_client import CollectorRegistry

from router.base.clock import Clock
from router.cache.exact import AnswerCache
from router.cache.meaning import Embed
from router.decisions.line import Decision
from router.gateway.http.settings import CorsSettings
from router.gateway.links import MediaSettings
from router.tenants.tenancy import Tenancy
from router.values.answer import Answer
from router.values.credits import Asker, Grant, Want
from router.values.prompt import Input, Prompt, PromptSize, TokenizerFacts
from router.values.readiness import Readiness
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.repository import Repository
from router.values.request import InferenceRequest, Locality
from router.values.status import NO_GPU_READINGS, GpuReadings, RouterStatus, Tally
from router.wire.reach import Reach

if TYPE_CHECKING:
    from router.jobs.jobs import Jobs  # SQLAlchemy: only who keeps jobs pays for it


class PromptTokenizer(Protocol):
    """Text to token ids and back, as the model reads prompts."""

    def tokenize(
        self, prompt: Prompt, *, special_tokens: bool = True, generation_prompt: bool = True, continuation: str = ""
    ) -> list[int]:
        """Return the ids of a prompt; raises `InvalidRequest` for one that cannot be encoded.

        Args:
            special_tokens: precede raw text by the first token of the model's sequences, where it has one.
            generation_prompt: end a conversation with the opening of the assistant's turn.
            continuation: text of the answer that the ids end with.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens; raises `InvalidRequest` for an id that is none."""
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each id as the model's files write it."""
        ...

    def facts(self) -> TokenizerFacts:
        """Return its special tokens and the model's chat template."""
        ...


class PromptCounter(Protocol):
    """Counts tokens with the tokenizer of a model, or estimates. Safe to call from a worker thread."""

    def count(self, model: str, prompt: Input) -> PromptSize:
        """Return the length of the rendered prompt.

        Raises:
            ModelNotFound: no tokenizer is known for `model`.
            ContextTooLong: the prompt cannot fit any window of `model`, whatever its tokens are.
            InvalidRequest: the prompt cannot be encoded (an id outside the vocabulary, a role the template refuses).
        """
        ...

    def tokenizer(self, model: str) -> PromptTokenizer:
        """Return the tokenizer of a model.

        Raises:
            ModelNotFound: no such model is served.
            InvalidRequest: its tokenizer is not on this tier.
        """
        ...


class Admission(Protocol):
    """What the gateway needs of `router.dispatch.admission`."""

    def grant(self, asker: Asker, want: Want) -> Grant | None:
        """Say what an instance of a tier below may send from now on; None sets no limit."""
        ...

    def charge(self, asker: Asker) -> Callable[[], None]:
        """A request of an instance has come; the result is called if it is refused before it cost anything."""
        ...


class Dispatch(Protocol):
    """What the gateway needs of `router.dispatch.dispatcher.Dispatcher`."""

    async def start(self, request: InferenceRequest) -> Answer:
        """Return when the first chunk is ready; raises any error of `router.base.errors`."""
        ...

    def explain(self, request_id: str, caller: str | None) -> Decision | None:
        """Return why a recent request of this caller, or of any where that is None, went where it went."""
        ...

    def load(self, asker: str = "") -> Sequence[ReplicaSnapshot]:
        """Return a snapshot of every replica, but of those that lead back to the tier that goes by `asker`."""
        ...

    def reach(self) -> Reach:
        """Return the tiers that requests may come to from here, this one included."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait for a replica in the tier's own queue."""
        ...

    def tallies(self) -> Mapping[tuple[str, str], Tally]:
        """Return what each variant of each tier has done since the start, by tier and variant."""
        ...

    def readiness(self, asker: str = "") -> Readiness:
        """Return whether any replica could take a request now, of those that do not lead back to `asker`."""
        ...

    def status(self) -> RouterStatus:
        """Return what an operator is told of the router and its replicas."""
        ...

    def known_models(self) -> Collection[str]:
        """Return every family and variant name that may be asked for."""
        ...

    def unreached(self, locality: Locality) -> str:
        """Name an upstream that might serve what nobody here does, and was never reached; empty if there is none."""
        ...

    @property
    def admission(self) -> Admission:
        """The credits of this tier."""
        ...


class Telemetry(Protocol):
    """What the gateway needs of `router.dispatch.records.telemetry`."""

    @property
    def registry(self) -> CollectorRegistry:
        """Where the metrics of this tier live."""
        ...


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """What one caller may cost before the router has seen the request.

    Attributes:
        max_body_bytes: larger bodies are refused with 413.
        max_bodies_bytes: memory for all bodies at once, each from its first byte until its prompt is counted; one that
            finds no room is shed. Never less than `max_body_bytes`; the first 64 KiB of each do not count.
        body_timeout_s: a body that takes longer to arrive is refused with 408.
        max_requests: requests inside the gateway at once, streams included; the next one is shed before its body
            is read.
        send_stall_s: a client that reads nothing for so long is taken for gone, and its work is cancelled.
        retry_after_s: told to callers while the tier is not ready or `max_requests` is reached.
    """

    max_body_bytes: int = 16 * 1024 * 1024
    max_bodies_bytes: int = 64 * 1024 * 1024
    body_timeout_s: float = 60.0
    max_requests: int = 4096
    send_stall_s: float = 60.0
    retry_after_s: float = 1.0


def always_open() -> str:
    """What a tier says that has nothing to wait for."""
    return ""


def back_unknown() -> float:
    """A tier that cannot tell when it will be open."""
    return 0.0


def no_gpus() -> GpuReadings:
    """A tier that reads no GPUs."""
    return NO_GPU_READINGS


def kv_usage_unknown() -> float | None:
    """KV use of a tier whose replicas do not tell."""
    return None


@dataclass(frozen=True, slots=True)
class GatewayDeps:
    """Everything the gateway needs of its tier.

    Attributes:
        tier: what this tier calls itself in `x-overspill-tier` and `/v1/models`.
        models: the replicas that `/v1/models` lists, local and remote.
        tenancy: who may come in and what each may ask for. Without any keys, only callers on loopback are let in.
        cache: answers that may be given again; None where none are kept.
        embed: embeds messages, so that they may be given again to what means nearly the same too.
        closed: why no request may come in (`starting`, `draining`); empty while they may.
        notices: what an operator should know although the tier is ready; told on `/health/ready`.
        back_in_s: seconds until a tier that is closed should be open, 0 where that is not known.
        repository: what its operator may load and unload; None where nothing is.
        cors: which web pages of other origins may read answers.
        local_pages: pages of this host may, as only this host reaches the tier.
        media: from where servers may be sent to fetch what requests link to.
        kv_usage: used share of the tier's KV cache in [0, 1], for the tier below; None if unknown.
        gpus: what its GPUs do, as read last.
        scale: how many replicas of a model, or of all, there should be, as `/v1/scale` tells it; returns None of a
            model of which nothing is known. None where the tier gives no such advice.
        jobs: files and batches; None where the tier keeps none.
    """

    dispatcher: Dispatch
    prompts: PromptCounter
    tier: Literal["edge", "cloud"]
    telemetry: Telemetry
    clock: Clock
    models: Callable[[], Sequence[ReplicaInfo]]
    tenancy: Tenancy = field(repr=False)
    cache: AnswerCache | None = None
    embed: Embed | None = None
    closed: Callable[[], str] = always_open
    notices: Callable[[], Sequence[str]] = tuple
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    repository: Repository | None = None
    cors: CorsSettings = field(default_factory=CorsSettings)
    local_pages: bool = True
    media: MediaSettings = field(default_factory=MediaSettings)
    kv_usage: Callable[[], float | None] = kv_usage_unknown
    back_in_s: Callable[[], float] = back_unknown
    gpus: Callable[[], GpuReadings] = no_gpus
    scale: Callable[[str | None], Mapping[str, object] | None] | None = None
    jobs: Jobs | None = None
