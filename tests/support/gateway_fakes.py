"""A dispatcher whose answers are scripted by the prompt, and a real uvicorn around the real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client import CollectorRegistry

from router.base.clock import MonotonicClock
from router.base.errors import ContextTooLong, DeadlineLost, ModelNotFound, ReplicaBroken, Shed, Unavailable
from router.decisions.line import AskedFor, Decision
from router.gateway.app import GatewayDeps, create_app
from router.gateway.deps import Dispatch
from router.tenants.tenancy import KeySources, Tenancy
from router.values.answer import Answer, Route
from router.values.chunk import FinishReason, TokenChunk
from router.values.credits import Asker, Want
from router.values.logprobs import Alternative, TokenLogprob
from router.values.prompt import ChatPrompt, Prompt, PromptSize, TextPrompt, TokenizerFacts
from router.values.prompt_size import estimate_size
from router.values.readiness import READY, Readiness
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest, Locality
from router.values.status import RouterStatus, Tally
from router.values.task import Call

FAMILY = "tiny"
PRIOR = SpeedPrior(prefill_tokens_per_s=900.0, decode_tokens_per_s=60.0, decode_batch_slope=0.1, source="test")


def replica_info(variant: str = "tiny-int8", rung: int = 1, **changes) -> ReplicaInfo:
    fields: dict[str, Any] = {
        "replica_id": f"local/{variant}",
        "endpoint": "local",
        "tier": "cloud",
        "remote": False,
        "family": FAMILY,
        "variant": variant,
        "rung": rung,
        "quality": 1.0 - rung / 10,
        "context_tokens": 2048,
        "prior": PRIOR,
    }
    return ReplicaInfo(**{**fields, **changes})


INFOS = [replica_info("tiny-fp32", 0), replica_info("tiny-int8", 1)]


def says(text: str) -> list[ChatCompletionMessageParam]:
    """The messages of a chat in which a user says `text`."""
    return [{"role": "user", "content": text}]


def prompt_text(prompt: Prompt | Call) -> str:
    assert not isinstance(prompt, Call), "what these fakes serve is generated"
    if isinstance(prompt, ChatPrompt):
        return prompt.messages[-1].content
    return prompt.text if isinstance(prompt, TextPrompt) else " ".join(map(str, prompt.token_ids))


class WordCounter:
    """One token a word; unknown models are refused, as a tier's counter does."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def count(self, model: str, prompt: Prompt) -> PromptSize:
        if model not in {FAMILY, "tiny-pruned-int8", *(info.variant for info in INFOS)}:
            raise ModelNotFound(f"`{model}` is not known", param="model")
        self.threads.append(threading.current_thread().name)
        if isinstance(prompt, ChatPrompt):
            return PromptSize(sum(len(message.content.split()) + 1 for message in prompt.messages))
        if isinstance(prompt, Call):
            return estimate_size(prompt)
        return PromptSize(len(prompt.text.split() if isinstance(prompt, TextPrompt) else prompt.token_ids))

    def tokenizer(self, model: str) -> WordTokenizer:
        return WordTokenizer()


class WordTokenizer:
    """One id a word: its length."""

    def tokenize(
        self, prompt: Prompt, *, special_tokens: bool = True, generation_prompt: bool = True, continuation: str = ""
    ) -> list[int]:
        words = [len(word) for word in f"{prompt_text(prompt)} {continuation}".split()]
        return ([1] if special_tokens else []) + words + ([2] if generation_prompt else [])

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join("x" * token for token in token_ids)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return ["x" * token for token in token_ids]

    def facts(self) -> TokenizerFacts:
        return TokenizerFacts("<s>", "</s>", adds_bos=True, chat_template="{{ messages }}")


class NoCredits:
    """A tier that issues none."""

    def grant(self, asker: Asker, want: Want) -> None:
        return None

    def charge(self, asker: Asker) -> Callable[[], None]:
        return lambda: None


def _told(request: InferenceRequest, words: Sequence[str], *, prompt: bool = False) -> tuple[TokenLogprob, ...]:
    """Each word is half as likely as no word at all."""
    top = request.sampling.logprobs
    if top is None:
        return ()
    nothing = Alternative("", -0.5, b"")
    return tuple(
        TokenLogprob(
            word, None if prompt and not at else -1.0, word.encode(), top=(nothing,) * top if at or not prompt else ()
        )
        for at, word in enumerate(words)
    )


def _scored(request: InferenceRequest, *, first: bool) -> tuple[TokenLogprob, ...]:
    if not (first and request.scores_prompt):
        return ()
    words = prompt_text(request.prompt).split(" ")
    return _told(request, [words[0], *(f" {word}" for word in words[1:])], prompt=True)


@dataclass
class FakeDispatcher:
    """What it does is asked for in the prompt: `say a b c`, `refuse shed`, `break`, `hang`, `forever`, `crash`, ….."""

    requests: list[InferenceRequest] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    cancelled_starts: list[str] = field(default_factory=list)
    snapshots: list[ReplicaSnapshot] = field(default_factory=list)
    waiting: int = 0
    ended: dict[tuple[str, str], Tally] = field(default_factory=dict)
    admission: NoCredits = field(default_factory=NoCredits)
    changed: threading.Condition = field(default_factory=threading.Condition)

    async def start(self, request: InferenceRequest) -> Answer:
        self.requests.append(request)
        verb, _, rest = prompt_text(request.prompt).partition(" ")
        refusals = {
            "shed": Shed("the queue is full", retry_after_s=0.25),
            "unavailable": Unavailable("no replica is healthy", retry_after_s=7.2),
            "deadline": DeadlineLost("too late", retry_after_s=1.0),
            "long": ContextTooLong("the prompt fits no window", param="messages"),
        }
        if verb == "refuse":
            raise refusals[rest]
        if verb == "crash":
            raise ZeroDivisionError("a bug")
        if verb == "hang":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self._note(self.cancelled_starts, request.request_id)
                raise
        route = Route(
            tier="cloud",
            variant="tiny-int8" if request.model == FAMILY else request.model,
            rung=1,
            reason="step-down",
            degraded=True,
            predicted_ttft_s=0.0421,
            max_tokens=request.sampling.max_tokens,
        )
        return Answer(route, self._chunks(request, verb, rest))

    async def _chunks(self, request: InferenceRequest, verb: str, rest: str) -> AsyncGenerator[TokenChunk, None]:
        try:
            if verb == "break-first":
                raise ReplicaBroken("the replica died")
            async for chunk in self._words(request, verb, rest):
                yield chunk
            if verb == "break":
                raise ReplicaBroken("the replica died")
            if verb == "bug":
                raise ZeroDivisionError("a bug")
            if verb == "stall":
                await asyncio.sleep(600)
        finally:
            self._note(self.closed, request.request_id)

    async def _words(self, request: InferenceRequest, verb: str, rest: str) -> AsyncGenerator[TokenChunk, None]:
        while verb in {"forever", "flood"}:
            yield TokenChunk("word " * (2000 if verb == "flood" else 1))
            await asyncio.sleep(0.002 if verb == "forever" else 0)
        words = (rest.split() or ["ok"]) if verb in {"say", "slow"} else ["one", "two"]
        limit = request.sampling.max_tokens or len(words)
        for index, word in enumerate(words[:limit]):
            shown = word if index == 0 else f" {word}"
            yield TokenChunk(
                shown, logprobs=_told(request, [shown]), prompt_logprobs=_scored(request, first=index == 0)
            )
            await asyncio.sleep(0.02 if verb == "slow" else 0)
        if verb not in {"break", "bug", "stall", "silent"}:
            yield TokenChunk("", 0, FinishReason.LENGTH if limit < len(words) else FinishReason.STOP)

    def forget(self) -> None:
        for seen in (self.requests, self.closed, self.cancelled_starts):
            seen.clear()

    def _note(self, where: list[str], request_id: str) -> None:
        with self.changed:
            where.append(request_id)
            self.changed.notify_all()

    def wait_closed(self, request_id: str) -> bool:
        """Wait until the answer to this request was closed."""
        with self.changed:
            return self.changed.wait_for(lambda: request_id in self.closed, timeout=10)

    def wait_cancelled(self, request_id: str) -> bool:
        """Wait until the request was cancelled before its first token."""
        with self.changed:
            return self.changed.wait_for(lambda: request_id in self.cancelled_starts, timeout=10)

    def explain(self, request_id: str, caller: str | None) -> Decision | None:
        made = [r for r in self.requests if r.request_id == request_id and caller in {None, r.caller}]
        if not made:
            return None
        return Decision(request_id=request_id, model=made[0].model, prompt_tokens=1, policy="p", objective=AskedFor())

    def load(self, asker: str = "") -> list[ReplicaSnapshot]:
        return self.snapshots or [ReplicaSnapshot(info, available=True, slots=4, running=1) for info in INFOS]

    def reach(self) -> dict[str, int]:
        return {"fake-instance": 0}

    def readiness(self, asker: str = "") -> Readiness:
        seen = self.load()
        if any(replica.available for replica in seen):
            return READY
        return Readiness(seen[0].why, seen[0].back_in_s)

    def status(self) -> RouterStatus:
        return RouterStatus(policy="p", waiting=self.waiting, queued=self.waiting, running=0, overloaded=False)

    def tallies(self) -> dict[tuple[str, str], Tally]:
        return self.ended

    def known_models(self) -> frozenset[str]:
        return frozenset({FAMILY, *(info.variant for info in INFOS)})

    def unreached(self, locality: Locality) -> str:
        return ""


class FakeTelemetry:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()


def tenancy_of(api_keys: Mapping[str, int] | None = None, max_priority: int = 0, **more) -> Tenancy:
    """Tenants of a tier whose keys are these, each with the highest priority that it may claim."""
    return Tenancy(KeySources.of(api_keys or {}, max_priority).directory(), MonotonicClock(), **more)


def gateway_deps(dispatcher: Dispatch | None = None, **changes) -> GatewayDeps:
    keys = {name: changes.pop(name) for name in ("api_keys", "max_priority") if name in changes}
    fields: dict[str, Any] = {
        "tenancy": tenancy_of(**keys),
        "dispatcher": dispatcher or FakeDispatcher(),
        "prompts": WordCounter(),
        "tier": "cloud",
        "telemetry": FakeTelemetry(),
        "clock": MonotonicClock(),
        "models": lambda: INFOS,
    }
    return GatewayDeps(**{**fields, **changes})


def client_of(deps: GatewayDeps, key: str = "", *, address: str = "127.0.0.1", **more) -> httpx.AsyncClient:
    """A client of the gateway's app without a socket; its connections come from `address`."""
    transport = httpx.ASGITransport(app=create_app(deps), client=(address, 5), raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, **more)


class Server:
    """A uvicorn in a thread with its own event loop, on a free loopback port."""

    def __init__(self, deps: GatewayDeps, port: int = 0) -> None:
        self.deps = deps
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(create_app(deps), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="gateway-under-test")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._server.run(sockets=[self._socket])

    @property
    def dispatcher(self) -> FakeDispatcher:
        """The fake that answers, where it is one."""
        assert isinstance(self.deps.dispatcher, FakeDispatcher)
        return self.deps.dispatcher

    def start(self) -> Server:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the gateway under test did not start")
            self._thread.join(0.005)
        return self

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()


@contextlib.contextmanager
def serving(deps: GatewayDeps | None = None, port: int = 0) -> Iterator[Server]:
    server = Server(deps or gateway_deps(), port).start()
    try:
        yield server
    finally:
        server.stop()
