"""One server behind a URL: its connections, the polls that watch it, and what is known of its condition."""

from __future__ import annotations

import abc
import asyncio
import random
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx
import structlog

from router.base.build import user_agent
from router.base.clock import Clock
from router.base.credentials import url_fault
from router.base.errors import ConfigError, InvalidRequest, in_words
from router.base.json_input import UNREADABLE
from router.base.shortage import own_shortage
from router.base.timers import end, within
from router.signals.credit_account import CreditAccount
from router.upstream.exchange.call import UpstreamRequest
from router.upstream.exchange.replica import Condition, UpstreamReplica
from router.upstream.exchange.stream import TransferSample
from router.upstream.http.client_tls import ClientTls
from router.upstream.http.handshake import HandshakeTrace
from router.upstream.http.probing import UNCOMPRESSED, ProbeReply, ask
from router.upstream.http.silence import LostNews
from router.upstream.http.transport import PoolOptions, StreamingClient
from router.upstream.servers.poll_schedule import PollSchedule
from router.upstream.source import SourceHooks
from router.values.replica import ReplicaInfo
from router.values.request import InferenceRequest
from router.values.status import NO_FACTS
from router.wire import load as wire_load
from router.wire.reach import Reach

if TYPE_CHECKING:
    from router.signals.link import Link

log = structlog.get_logger("router.gateway")

FOREIGN_IDLE_S = 4.0
"""Uvicorn, before most engines, closes a connection that was idle for 5 s."""
_REDISCOVER_EVERY_POLLS = 30


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Transport to a server. How long an answer may take is the router's to say, for every kind of replica alike.

    Attributes:
        api_key: sent as bearer key.
        poll_interval_s: between two polls of its load.
        idle_poll_interval_s: the same, once it was not used for a minute; at least `poll_interval_s`.
        ca_file: PEM bundle to trust instead of the system's.
        client_cert, client_key: PEM files for mutual TLS, both or neither.
        connect_timeout_s: TCP and TLS handshake.
        probe_timeout_s: whole exchange of a load poll or discovery.
        max_connections: to this server at once.
        keepalive_expiry_s: how long an idle connection is kept; less than the server keeps it, or a request now and
            then meets a connection that is just being closed.
    """

    api_key: str | None = None
    poll_interval_s: float = 1.0
    idle_poll_interval_s: float = 0.0
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    connect_timeout_s: float = 2.0
    probe_timeout_s: float = 3.0
    max_connections: int = 512
    keepalive_expiry_s: float = FOREIGN_IDLE_S


class PolledServer(abc.ABC):
    """Use as `async with`: polling runs in the background until it is left.

    The server may be down at first and come later. Replicas once found are kept while it is unreachable; their
    snapshots say so and age. A kind of server says how it is probed (`_probe`) and what a request to it looks like.

    Attributes:
        facts: what an operator is told of it beside its load; set by its kind.
        reach: the tiers that it leads to, itself included; nothing where it is none.

    Args:
        base_url: of the server; also the `endpoint` of its replicas.
        link: learns round trip and throughput from real exchanges.
        name: of the backend, what its replicas' ids begin with and messages call it; empty: the tier's upstream.

    Raises:
        ConfigError: the URL or a TLS file is wrong.
    """

    def __init__(
        self,
        base_url: str,
        *,
        link: Link,
        clock: Clock,
        options: ServerOptions | None = None,
        hooks: SourceHooks | None = None,
        name: str = "",
    ) -> None:
        self.endpoint = _checked_url(base_url, f"backends.{name}" if name else "upstream.url")
        self.name = name
        self._names = {"endpoint": self.endpoint, "backend": name} if name else {"endpoint": self.endpoint}
        self.link = link
        self.clock = clock
        self.condition = Condition()
        self.lost = LostNews()
        self.facts = NO_FACTS
        self.reach: Reach = {}
        self._options = options or ServerOptions()
        draw = random.Random()  # noqa: S311 - spreads polls, hides nothing
        self.credits = CreditAccount(clock, draw)
        often_s, idle_s = self._options.poll_interval_s, self._options.idle_poll_interval_s
        self._schedule = PollSchedule(often_s, clock, self.credits, draw, idle_s)
        self._hooks = hooks or SourceHooks()
        secure = self.endpoint.startswith("https:")
        files = (self._options.ca_file, self._options.client_cert, self._options.client_key)
        self._tls = ClientTls(*files) if secure else None
        key = self._options.api_key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._replicas: list[UpstreamReplica] = []
        self._told = False
        self._said: set[str] = set()
        self._missed_probes = 0
        self._refused = False
        self._answers_seen = 0
        self._polls_since_discovery = _REDISCOVER_EVERY_POLLS
        self._wake = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> list[UpstreamReplica]:
        """What was found so far, best first; empty until the server was reached once."""
        return list(self._replicas)

    @property
    def unreached(self) -> str:
        """Say why nothing is known of what it serves; empty once it has told."""
        return "" if self._told else self.condition.why or "what it serves is being found out"

    @property
    def who(self) -> str:
        return f"backend {self.name.partition('@')[0]}" if self.name else "the upstream"

    @property
    def where(self) -> str:
        return self.endpoint

    async def __aenter__(self) -> PolledServer:
        options = self._options
        self.client = StreamingClient(
            self.endpoint,
            self._headers,
            self.clock,
            PoolOptions(self._context, options.connect_timeout_s, options.max_connections, options.keepalive_expiry_s),
        )
        # Probes have their own connection: a pool full of streams must not look like an outage.
        self._probe_client = self._new_probe_client()
        self._watcher = asyncio.create_task(self._watch(), name=f"upstream {self.endpoint}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            await end(self._watcher)
        await self._probe_client.aclose()
        await self.client.close()

    @property
    def _context(self) -> ssl.SSLContext | bool:
        return self._tls.context if self._tls is not None else False

    def _new_probe_client(self) -> httpx.AsyncClient:
        options = self._options
        return httpx.AsyncClient(
            base_url=self.endpoint,
            headers={"user-agent": user_agent(), **self._headers, **UNCOMPRESSED},
            verify=self._context,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=options.connect_timeout_s, pool=options.connect_timeout_s),
            limits=httpx.Limits(max_connections=2, keepalive_expiry=options.keepalive_expiry_s),
        )

    def learn(self, transfer: TransferSample) -> None:
        """Learn about the link, of its connections alone: others may send a head with the first token only."""
        if transfer.connect_s > 0:
            self.link.observe_connect(transfer.connect_s)

    def refused(self, info: ReplicaInfo, request: InferenceRequest, error: InvalidRequest) -> None:
        """A model says that something is wrong with a request: of a tier of ours nothing is learnt from that."""
        log.debug("request refused", request_id=request.request_id, variant=info.variant, why=error.message)

    def doubt(self) -> None:
        self._wake.set()

    def used(self) -> None:
        """A request goes there: polls that had become rare are due again."""
        if self._schedule.used():
            self._wake.set()

    def wanted(self) -> None:
        """A request has begun to wait, perhaps for a credit of this server."""
        if self.condition.reachable and self._schedule.wants_poll():
            self._wake.set()

    def lose(self, why: str) -> None:
        """End every stream from it."""
        self.lost.tell(why)

    # ── what a kind of server says ──────────────────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def call(self, request: InferenceRequest, info: ReplicaInfo) -> UpstreamRequest:
        """Return what to send for `request`."""

    @abc.abstractmethod
    async def _probe(self) -> None:
        """Read condition and load, and what it serves where that is due (`_due`); ends with `_reached`.

        Raises:
            httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError, RecursionError: it does not answer as it should.
        """

    # ── polling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._poll()
            except Exception:  # the task boundary: one bad poll, or a hook's bug, must not end polling
                log.exception("upstream poll crashed", endpoint=self.endpoint)
            await self._pause()

    async def _pause(self) -> None:
        """Wait for the next poll; a request that could not reach the server, or needs a credit, brings it forward.

        So does a refused connection: nobody listens there. Probes that confirm it follow at a tenth of the interval.
        """
        began_s = self.clock.now_s()
        confirming = self._refused and 0 < self._missed_probes < self._hooks.misses_to_be_lost()
        wants = self._hooks.want().waiting > 0 and not self.credits.in_line
        busy = wants or self._missed_probes > 0 or any(replica.busy for replica in self._replicas)
        pause_s = self._schedule.pause_s(reachable=self.condition.reachable, busy=busy, confirming=confirming)
        sleep = asyncio.create_task(self.clock.sleep(pause_s))
        wake = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({sleep, wake}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(sleep, wake)
        if self._wake.is_set():
            # Not more often than ten times the usual pace, however many requests fail or wait.
            await self.clock.sleep(max(0.0, self._schedule.soonest_s - (self.clock.now_s() - began_s)))

    async def _poll(self) -> None:
        self._answers_seen = self._answers()
        renewed = self._tls is not None and self._tls.renewed()
        if renewed:
            self.client.drop_idle()
        if self.client.drop_gone() or renewed:  # and with it what probes go by
            await self._probe_client.aclose()
            self._probe_client = self._new_probe_client()
        try:
            await within(self._options.probe_timeout_s, self._probe())
        except (asyncio.TimeoutError, httpx.TimeoutException):
            self._refused = False
            self.client.drop_idle()
            self._missed(f"no answer to a probe within {self._options.probe_timeout_s:g} s", silent=True)
        except (httpx.HTTPError, *UNREADABLE) as error:
            shortage = own_shortage(error)
            if shortage:
                self._untold(shortage)
                return
            self._refused = isinstance(error, httpx.ConnectError)
            self._missed(in_words(error) if self._tls is None else self._tls.in_words(error), silent=False)

    def _untold(self, why: str) -> None:
        """A probe could not be sent: that says nothing of the server."""
        if why not in self._said:
            self._said.add(why)
            log.warning("upstream not probed", endpoint=self.endpoint, why=why)

    def _answers(self) -> int:
        """Chunks that requests have got from it so far: live traffic proves that it can be reached."""
        return sum(replica.chunks_received for replica in self._replicas)

    def _due(self, *, changed: bool = False) -> bool:
        """Count a poll, and say whether it shall read again what the server serves."""
        self._polls_since_discovery += 1
        news = changed or not self._replicas or not self.condition.reachable
        return news or self._polls_since_discovery >= _REDISCOVER_EVERY_POLLS

    async def _get(
        self, path: str, trace: HandshakeTrace | None = None, headers: Sequence[tuple[str, str]] = ()
    ) -> ProbeReply:
        extensions = {} if trace is None else {"trace": trace}
        return await self._ask("GET", path, headers=list(headers), extensions=extensions)

    async def _ask(self, method: str, path: str, **more: Any) -> ProbeReply:
        """Send a probe's request and read the reply, within its bound.

        Raises:
            httpx.HTTPError: nothing came, or too much.
        """
        return await ask(self._probe_client, method, path, **more)

    async def _models(self, headers: Sequence[tuple[str, str]] = ()) -> bytes:
        """Return what `GET /v1/models` says.

        Raises:
            httpx.HTTPError: it says nothing.
        """
        reply = await self._get("/v1/models", headers=headers)
        if reply.status_code in {401, 403}:
            raise httpx.HTTPError(f"it does not accept this tier's API key (HTTP {reply.status_code})")
        if reply.status_code != 200:
            raise httpx.HTTPError(f"GET /v1/models: HTTP {reply.status_code}")
        return reply.content

    def _take(self, infos: list[ReplicaInfo]) -> None:
        """Put the replicas found in place; one that has not changed stays, and with it its load."""
        self._told = True
        self._polls_since_discovery = 0
        kept = {replica.info: replica for replica in self._replicas}
        found = [kept.get(info) or UpstreamReplica(info, self) for info in sorted(infos, key=_by_rung)]
        if found == self._replicas:
            return
        self._replicas = found
        log.info("upstream rungs", endpoint=self.endpoint, variants=[info.variant for info in infos])
        self._hooks.on_change()

    def _report(self, report: wire_load.LoadReport, at_s: float, *, counts_ours: bool = True) -> None:
        for replica in self._replicas:
            replica.report(report, at_s, counts_ours=counts_ours)

    def _reached(self, *, ready: bool, why: str = "", back_in_s: float = 0.0) -> None:
        if not self.condition.reachable:
            log.info("upstream reached", **self._names, ready=ready)
        self._missed_probes = 0
        self._said.clear()
        self.condition = Condition(reachable=True, ready=ready, why=why, back_in_s=back_in_s)
        if ready:
            self._hooks.probe_succeeded(self.endpoint)

    def _missed(self, why: str, *, silent: bool) -> None:
        """A probe failed: no verdict yet, unless enough did in a row and no request got anything meanwhile.

        Args:
            silent: nothing came back at all, so streams in flight would wait for nothing too.
        """
        if self._answers() != self._answers_seen:
            self._missed_probes = 0
            log.debug("probe failed while requests are answered", endpoint=self.endpoint, why=why)
            return
        self._missed_probes += 1
        if self.condition.reachable and self._missed_probes < self._hooks.misses_to_be_lost():
            log.debug("probe failed", endpoint=self.endpoint, why=why, in_a_row=self._missed_probes)
        else:
            if why not in self._said:  # each reason once until it is reached again
                self._said.add(why)
                log.warning("upstream unreachable", **self._names, why=why)
            self.condition = Condition(reachable=False, ready=False, why=f"unreachable: {why}")
            if silent:
                self.lost.tell(why)
        self._hooks.probe_failed(self.endpoint, why)


def _by_rung(info: ReplicaInfo) -> tuple[str, int]:
    return info.family, info.rung


def _checked_url(base_url: str, param: str) -> str:
    fault = url_fault(base_url)
    if fault:
        raise ConfigError(f"{param}: {fault}", param=param)
    return base_url.rstrip("/").removesuffix("/v1")
