"""The client to an upstream tier of Overspill: finds its rungs, watches its load, and asks for credits."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import httpx
import msgspec
import structlog

from router.base.json_input import UNREADABLE
from router.upstream.codec.refusals import UpstreamError, retry_after_s
from router.upstream.exchange.call import UpstreamRequest
from router.upstream.exchange.stream import TransferSample
from router.upstream.http.handshake import HandshakeTrace
from router.upstream.servers.polled import PolledServer
from router.upstream.servers.rungs import read_rungs
from router.values.credits import Want
from router.values.replica import ReplicaInfo
from router.values.request import InferenceRequest
from router.values.status import ReplicaFacts
from router.wire import credits as wire_credits
from router.wire import load as wire_load
from router.wire import names as wire_names
from router.wire.reach import decode_reach

IDLE_CONNECTION_S = 50.0
"""How long a connection to a tier is kept that nobody uses: a tier keeps it for 75 s, and proxies before it a minute.
Turns of a chat come further apart than a foreign server's 5 s, and over a mobile network a new connection costs 0.3 s.
"""

TOKEN_BYTES = 100.0
"""What a token of an answer takes of the network: a brief event, and the headers around it."""

log = structlog.get_logger("router.gateway")


class _NotReady(msgspec.Struct):
    error: UpstreamError | None = None


@final
class UpstreamTier(PolledServer):
    """Another tier of Overspill: what its gateway says of its rungs, load and credits is read from one poll.

    The ids of its replicas begin with `name`, or where there is none with what it calls itself.
    """

    _unreadable_told = False
    _last_report: tuple[str, wire_load.LoadReport | None] = ("", None)

    def call(self, request: InferenceRequest, info: ReplicaInfo) -> UpstreamRequest:
        return UpstreamRequest(
            request=request,
            model=info.variant,
            who=self.who,
            context_tokens=info.context_tokens,
            rtt_s=self.link.snapshot().rtt_s,
            packs=self.link.slow,
            instance=self._hooks.instance if self.credits.limited or len(self.reach) > 1 else None,
        )

    def learn(self, transfer: TransferSample) -> None:
        """Learn about link and load: it sends its head at once, and tells how long it took to."""
        super().learn(transfer)
        took_s = transfer.transfer_s - self.link.snapshot().rtt_s
        self.link.observe_transfer(transfer.sent_bytes, took_s, transfer.body_bytes)
        report = self._read_report(transfer.report)
        if report is not None:
            self._report(report, transfer.at_s)

    def _read_report(self, told: str) -> wire_load.LoadReport | None:
        """Read the load that came with an answer; one that says what the last one said is not read again."""
        if told != self._last_report[0]:
            self._last_report = told, wire_load.decode_orca(told)
        return self._last_report[1]

    @property
    def local(self) -> bool:
        return False

    async def _probe(self) -> None:
        """Read readiness and load, and the rungs when they are not known or may have changed."""
        trace = HandshakeTrace(self.clock)
        began_s = self.clock.now_s()
        want = self._hooks.want()
        asking = wire_credits.asking_headers(self._hooks.instance, want)
        reply = await self._get("/health/ready", trace, asking)
        ended_s = self.clock.now_s()
        if reply.status_code not in {200, 503}:
            raise httpx.HTTPError(f"GET /health/ready: HTTP {reply.status_code}, is this an Overspill gateway?")
        self.link.observe_rtt(trace.handshake_s if trace.handshake_s is not None else ended_s - began_s)
        report = wire_load.decode_orca(reply.headers.get(wire_load.HEADER, ""))
        self.reach = decode_reach(reply.headers.get(wire_names.REACH, ""))
        if self._due(changed=self._has_others(report)):
            self._find(await self._models([(wire_names.INSTANCE, self._hooks.instance)] if self.reach else []))
        self.facts = ReplicaFacts(kind="overspill", kv_usage=None if report is None else report.kv_usage)
        if report is not None:
            self._report(report, began_s)
            self._take_grant(report, began_s, want)
        ready = reply.status_code == 200
        why, back_in_s = ("", 0.0) if ready else (f"upstream: {_reason(reply.content)}", retry_after_s(reply.headers))
        self._reached(ready=ready, why=why, back_in_s=back_in_s)

    def _has_others(self, report: wire_load.LoadReport | None) -> bool:
        """Whether it reports the load of a variant that it was not known to serve."""
        known = {replica.info.variant for replica in self._replicas}
        return report is not None and not {load.variant for load in report.variants} <= known

    def _find(self, cards: bytes) -> None:
        found = read_rungs(cards, self.endpoint)
        if found.unreadable and not self._unreadable_told:
            self._unreadable_told = True
            log.warning("upstream rung unreadable", endpoint=self.endpoint, why=found.unreadable)
        name = self.name
        self._take([replace(info, replica_id=f"{name}/{info.variant}") if name else info for info in found.infos])

    def _take_grant(self, report: wire_load.LoadReport, asked_at_s: float, want: Want) -> None:
        if report.grant_unreadable:
            self.credits.misread()
            log.warning("upstream credits unreadable", endpoint=self.endpoint, so_far=self.credits.unreadable)
        else:
            self.credits.told(report.grant, asked_at_s, want.waiting)


def _reason(body: bytes) -> str:
    try:
        told = msgspec.json.decode(body, type=_NotReady).error
    except UNREADABLE:
        told = None
    return told.message if told is not None and told.message else "not ready"
