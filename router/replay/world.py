"""From a log to what the simulator takes: devices as they were seen, requests as they came."""

from __future__ import annotations

import re
from dataclasses import dataclass

from router.base.errors import InvalidRequest
from router.replay.lengths import Lengths, lengths_of
from router.replay.log import Log, LoggedReplica
from router.replay.speeds import Speed, link_of, speeds_of
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, LinkSpec, NoiseSpec, RungSpec, World

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_POLL_MS = 1_000.0  # how often an upstream is looked at by default
LEFT = "left"
"""Label of a request whose caller went before its end."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A log, ready to be replayed.

    Attributes:
        requests: one for each request of the log, in its order.
        speeds: by replica id; lengths: where the answers' lengths come from.
    """

    log: Log
    world: World
    requests: tuple[SimRequest, ...]
    speeds: dict[str, Speed]
    lengths: Lengths


def build(log: Log, seed: int = 0) -> Replay:
    """Build the world of a log.

    Args:
        seed: of the lengths that have to be drawn.

    Raises:
        InvalidRequest: the log shows no replica that could serve.
    """
    speeds, sigma = speeds_of(log.replicas, log.requests)
    by_device: dict[str, list[LoggedReplica]] = {}
    for replica in log.replicas.values():
        rungs = by_device.setdefault(replica.device, [])
        if all(other.row.variant != replica.row.variant for other in rungs):
            rungs.append(replica)
    if not by_device:
        raise InvalidRequest("the log shows no replica")
    names: set[str] = set()
    devices = tuple(_device(name, rungs, speeds, names) for name, rungs in by_device.items())
    world = World(
        devices=devices,
        family=_name(next(iter(log.replicas.values())).row.family or "model"),
        report_interval_ms=_POLL_MS,
        noise=NoiseSpec(sigma=round(sigma, 4), prior_error_sigma=0.0),
    )
    lengths = lengths_of(log.requests, seed)
    begin_s = log.requests[0].accepted_s
    requests = tuple(
        SimRequest(
            arrival_s=request.accepted_s - begin_s,
            prompt_tokens=max(request.prompt_tokens, 1),
            answer_tokens=tokens,
            objective=request.objective,
            max_tokens=request.max_tokens,
            caller=request.caller,
            kind=LEFT if request.left else "",
            prompt_bytes=request.prompt_bytes,
            ignore_eos=request.ignore_eos and request.max_tokens is not None,
            model=_name(request.model),
        )
        for request, tokens in zip(log.requests, lengths.tokens, strict=True)
    )
    return Replay(log, world, requests, speeds, lengths)


def _device(key: str, rungs: list[LoggedReplica], speeds: dict[str, Speed], names: set[str]) -> DeviceSpec:
    rungs = sorted(rungs, key=lambda replica: replica.row.rung or 0)
    first = rungs[0].row
    name = _name(key.partition("://")[2] or key)[:56]
    while name in names:
        name = f"{name}-{len(names)}"
    names.add(name)
    link = next((found for replica in rungs if (found := link_of(replica)) is not None), None)
    return DeviceSpec(
        name=name,
        slots=min(max(replica.slots for replica in rungs), 4096),
        rungs=tuple(_rung(replica, speeds[replica.row.replica]) for replica in rungs),
        remote=first.remote,
        endpoint=first.endpoint or key,
        link=LinkSpec(rtt_ms=link[0] * 1e3, uplink_mbps=link[1] * 8 / 1e6) if link else LinkSpec(rtt_ms=0.0),
    )


def _rung(replica: LoggedReplica, speed: Speed) -> RungSpec:
    row = replica.row
    return RungSpec(
        variant=_name(row.variant),
        quality=row.quality or 0.0,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
        step_ms=speed.step_s * 1e3,
        batch_slope=row.decode_batch_slope or 0.0,
        context_tokens=row.context_tokens or 1,
        family=_name(row.family or ""),
    )


def _name(text: str) -> str:
    """Return a text as the simulator's names are written."""
    return _NOT_IN_A_NAME.sub("-", text).strip("-._")[:64]
