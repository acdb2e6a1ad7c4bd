"""Prefill and decode on servers of their own: two pools of vLLM servers behind one name, and the hand-over.

A prompt that a decode server computes holds up every answer that it is writing. Where that costs more than the
detour, the prompt is computed in the prefill pool, and vLLM's KV connector carries its keys and values over:

- `nixl`: the prefill server's answer names the blocks that it holds (`kv_transfer_params`); the decode server fetches
  them itself.
- `shared-folder`: the prefill server writes them where the decode server finds them by the prompt.

With r the answers being written at the decode server, P and D the seconds of this prompt on a prefill and on the
decode server, W_P and W_D those of the prompts before it, and T the transfer, handing over spares r · D seconds of
standing still and moves the first token by (W_P + P + T) − (W_D + D). It is done where it spares more than it costs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Literal, final

import msgspec
import structlog

from router.base.clock import Clock
from router.base.errors import InvalidRequest, OverspillError, ReplicaFailed
from router.base.json_input import UNREADABLE
from router.base.timers import within
from router.upstream.exchange.replica import UpstreamReplica
from router.upstream.source import ReplicaSource
from router.values.chunk import TokenChunk
from router.values.link import LinkSnapshot
from router.values.replica import Replica, ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest
from router.values.status import ReplicaFacts

log = structlog.get_logger("router.gateway")

Connector = Literal["nixl", "shared-folder"]

_NIXL_ASKS: Mapping[str, object] = MappingProxyType(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
# A guess at a transfer until some were seen: a round of messages, and some gigabytes a second.
_TRANSFER_S = 0.02
_TRANSFER_TOKEN_S = 2e-6
_LEARN = 0.2
_PATIENCE = 4.0  # times the predicted time, until a prefill server is given up on
_PATIENCE_S = 5.0


class _Held(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class HandOver:
    """What handing one prompt over is predicted to be worth; seconds.

    Attributes:
        spared_s: that answers being written at the decode server do not stand still.
        later_s: by how much its own first token comes later; negative where it comes sooner.
        prefill_s: until the prefill server has answered.
    """

    spared_s: float
    later_s: float
    prefill_s: float

    @property
    def gain_s(self) -> float:
        return self.spared_s - self.later_s


class TransferCost:
    """Seconds from the prefill server's answer to the decode server's first token: a guess, scaled by what is seen."""

    def __init__(self) -> None:
        self._factor = 1.0

    def predict_s(self, prompt_tokens: int) -> float:
        return self._factor * self._guess_s(prompt_tokens)

    def observe(self, prompt_tokens: int, seen_s: float) -> None:
        self._factor += _LEARN * (seen_s / self._guess_s(prompt_tokens) - self._factor)

    @staticmethod
    def _guess_s(prompt_tokens: int) -> float:
        return _TRANSFER_S + _TRANSFER_TOKEN_S * prompt_tokens


def weigh(request: InferenceRequest, prefill: ReplicaSnapshot, decode: ReplicaSnapshot, transfer_s: float) -> HandOver:
    """Predict what computing a prompt elsewhere is worth; the formula stands at the top of this file."""
    there, here = prefill.info.prior, decode.info.prior
    prefill_s = (prefill.queued_prefill_tokens + request.prompt_tokens) / there.prefill_tokens_per_s
    alone_s = request.prompt_tokens / here.prefill_tokens_per_s
    queued_s = decode.queued_prefill_tokens / here.prefill_tokens_per_s
    return HandOver(
        spared_s=decode.running * alone_s,
        later_s=prefill_s + transfer_s - (queued_s + alone_s),
        prefill_s=prefill_s,
    )


@final
class DisaggregatedReplica:
    """A decode server, and the prefill pool that may compute its prompts; to the router it is the decode server.

    Args:
        prefill: returns the replicas of the prefill pool.

    Attributes:
        handed_over, fell_back: requests whose prompt was computed in the prefill pool; those for which that failed, so
            that the decode server computed it after all.
    """

    def __init__(
        self, decode: UpstreamReplica, prefill: Callable[[], Sequence[Replica]], connector: Connector, clock: Clock
    ) -> None:
        self.decode = decode
        self.handed_over = 0
        self.fell_back = 0
        self._prefill = prefill
        self._connector = connector
        self._clock = clock
        self._transfer = TransferCost()

    @property
    def info(self) -> ReplicaInfo:
        return self.decode.info

    @property
    def link(self) -> LinkSnapshot | None:
        return self.decode.link

    def snapshot(self) -> ReplicaSnapshot:
        return self.decode.snapshot()

    def facts(self) -> ReplicaFacts:
        """See `router.values.status.TellsFacts`."""
        return self.decode.facts()

    def hand_over(self, request: InferenceRequest) -> tuple[UpstreamReplica, HandOver] | None:
        """Return the prefill server to compute the prompt, and why; None where the decode server had better do it."""
        transfer_s, decode = self._transfer.predict_s(request.prompt_tokens), self.decode.snapshot()
        best: tuple[UpstreamReplica, HandOver] | None = None
        for replica in self._prefill():
            if not isinstance(replica, UpstreamReplica) or replica.info.variant != self.info.variant:
                continue
            snapshot = replica.snapshot()
            if snapshot.available and request.least_prompt_tokens < snapshot.info.context_tokens:
                found = weigh(request, snapshot, decode, transfer_s)
                if best is None or found.gain_s > best[1].gain_s:
                    best = replica, found
        return best if best is not None and best[1].gain_s > 0 else None

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; see `router.values.replica.Replica.generate`."""
        chosen = self.hand_over(request)
        fields = await self._computed(request, *chosen) if chosen is not None else None
        handed_at_s = self._clock.now_s() if fields is not None else None
        async with contextlib.aclosing(self.decode.generate(request, fields)) as stream:
            async for chunk in stream:
                if handed_at_s is not None and chunk.tokens:
                    self._transfer.observe(request.prompt_tokens, self._clock.now_s() - handed_at_s)
                    handed_at_s = None
                yield chunk

    async def _computed(
        self, request: InferenceRequest, prefill: UpstreamReplica, worth: HandOver
    ) -> Mapping[str, object] | None:
        """Have the prompt computed, and return what to tell the decode server; None where that failed.

        Raises:
            InvalidRequest: the request is at fault, and would be at the decode server too.
        """
        asks: Mapping[str, object] = {"kv_transfer_params": dict(_NIXL_ASKS)} if self._connector == "nixl" else {}
        try:
            body = await within(_PATIENCE * worth.prefill_s + _PATIENCE_S, prefill.compute_prompt(request, asks))
            found = self._tell(body)
        except InvalidRequest:
            raise
        except (OverspillError, asyncio.TimeoutError) as error:
            self.fell_back += 1
            why = str(error) or "it took too long"
            log.warning(
                "prefill failed; the decode server computes the prompt", replica=prefill.info.replica_id, why=why
            )
            return None
        self.handed_over += 1
        log.debug(
            "prompt handed over",
            request_id=request.request_id,
            prefill=prefill.info.replica_id,
            decode=self.info.replica_id,
            gain_s=round(worth.gain_s, 4),
        )
        return found

    def _tell(self, body: bytes) -> Mapping[str, object]:
        """Return the fields that lead the decode server to what the prefill server holds.

        Raises:
            ReplicaFailed: the prefill server does not say where that is.
        """
        if self._connector != "nixl":
            return {}
        try:
            held = msgspec.json.decode(body, type=_Held).kv_transfer_params
        except UNREADABLE:
            held = None
        if not held:
            raise ReplicaFailed("its answer has no `kv_transfer_params`: is it started with a NixlConnector?")
        return {"kv_transfer_params": held}


@final
class Disaggregated:
    """A `ReplicaSource` of two: the replicas of `decode`, whose prompts those of `prefill` may compute."""

    def __init__(self, prefill: ReplicaSource, decode: ReplicaSource, connector: Connector, clock: Clock) -> None:
        self._pools = (prefill, decode)
        self._connector = connector
        self._clock = clock
        self._stack = contextlib.AsyncExitStack()
        self._joined: dict[int, tuple[Replica, DisaggregatedReplica]] = {}

    @property
    def who(self) -> str:
        return self._pools[1].who

    @property
    def local(self) -> bool:
        return self._pools[1].local

    @property
    def replicas(self) -> Sequence[Replica]:
        """Those of the decode pool; one that this tier cannot speak to itself stays as it is."""
        found: list[Replica] = []
        joined: dict[int, tuple[Replica, DisaggregatedReplica]] = {}
        for replica in self._pools[1].replicas:
            if isinstance(replica, UpstreamReplica):
                kept = self._joined.get(id(replica)) or (replica, self._join(replica))
                joined[id(replica)] = kept
                found.append(kept[1])
            else:
                found.append(replica)
        self._joined = joined
        return found

    @property
    def where(self) -> str:
        return self._pools[1].where

    @property
    def unreached(self) -> str:
        return self._pools[1].unreached

    def wanted(self) -> None:
        for pool in self._pools:
            pool.wanted()

    def lose(self, why: str) -> None:
        for pool in self._pools:
            pool.lose(why)

    async def __aenter__(self) -> Disaggregated:
        async with contextlib.AsyncExitStack() as stack:
            for pool in self._pools:
                await stack.enter_async_context(pool)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def _join(self, decode: UpstreamReplica) -> DisaggregatedReplica:
        return DisaggregatedReplica(decode, lambda: self._pools[0].replicas, self._connector, self._clock)
