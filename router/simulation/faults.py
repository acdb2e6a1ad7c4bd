"""What goes wrong in a simulation, by the clock, and how the router's tier finds out: probes of remote devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from router.base.clock import Clock
from router.simulation.network import NetworkPath
from router.simulation.replica import Host, SimReplica
from router.simulation.world import DeadReplica, Faults

_PROBE_TIMEOUT_S = 3.0  # as `router.upstream.servers.tier.TierOptions` has it
_AFTER_A_REFUSAL = 0.1  # share of the interval until the next probe


@dataclass(frozen=True, slots=True)
class SimDevice:
    """A device, its place in the world and its rungs."""

    host: Host
    replicas: Sequence[SimReplica]

    def rungs(self, variant: str) -> list[SimReplica]:
        return [replica for replica in self.replicas if variant in ("", replica.info.variant)]


def schedule_faults(faults: Faults, devices: Mapping[str, SimDevice], loop: asyncio.AbstractEventLoop) -> None:
    """Set a timer for the begin and the end of each fault; the loop is at its time 0."""
    for cut in faults.cut:
        path = _path(devices[cut.device])
        loop.call_at(cut.from_s, path.cut_off, cut.to_s)
    for slow in faults.slow_link:
        path = _path(devices[slow.device])
        loop.call_at(slow.from_s, path.worsen, slow.uplink_factor, slow.rtt_factor)
        loop.call_at(slow.to_s, path.worsen, 1.0, 1.0)
    for dead in faults.dead_replica:
        for replica in devices[dead.device].rungs(dead.variant):
            loop.call_at(dead.from_s, replica.die)
            loop.call_at(dead.to_s, _revive, replica, dead, faults)
    for mode in faults.power_mode:
        device = devices[mode.device].host.device
        loop.call_at(mode.from_s, device.set_speed, mode.speed)
        loop.call_at(mode.to_s, device.set_speed, 1.0)


def _revive(replica: SimReplica, ended: DeadReplica, faults: Faults) -> None:
    """Revive a rung, unless another fault holds it: one of its device, or one of its own."""
    others = (
        fault
        for fault in faults.dead_replica
        if fault is not ended and fault.device == ended.device and fault.variant in ("", replica.info.variant)
    )
    if not any(fault.from_s <= ended.to_s < fault.to_s for fault in others):
        replica.revive()


def _path(device: SimDevice) -> NetworkPath:
    path = device.host.path
    assert path is not None  # noqa: S101 - the world refuses link faults of local devices
    return path


@dataclass(frozen=True, slots=True)
class ProbeHooks:
    """What is told of probes: the endpoint, and why one failed."""

    succeeded: Callable[[str], None]
    failed: Callable[[str, str], None]


class Prober:
    """Probes one remote device as `router.upstream.servers.tier` does.

    Args:
        misses_to_be_lost: probes in a row that have to fail before it counts as unreachable.
    """

    def __init__(
        self, device: SimDevice, interval_s: float, misses_to_be_lost: int, hooks: ProbeHooks, clock: Clock
    ) -> None:
        self._path = _path(device)
        self._replicas = device.replicas
        self._known = device.host.known
        self._endpoint = device.replicas[0].info.endpoint
        self._interval_s = interval_s
        self._misses_to_be_lost = misses_to_be_lost
        self._hooks = hooks
        self._clock = clock
        self._missed = 0

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            pause_s = self._interval_s
            if self._path.cut:
                await self._clock.sleep(_PROBE_TIMEOUT_S)
            else:
                await self._clock.sleep(2 * self._path.one_way_s(1.0))
            if self._path.cut:
                self._miss(f"no answer to a probe within {_PROBE_TIMEOUT_S:g} s", silent=True)
            elif not any(replica.alive for replica in self._replicas):
                self._miss("connection refused", silent=False)
                pause_s *= _AFTER_A_REFUSAL if self._missed < self._misses_to_be_lost else 1.0
            else:
                self._reach()
            await self._clock.sleep(pause_s)

    def _reach(self) -> None:
        self._missed = 0
        self._known.why = ""
        self._known.dead = {replica.info.variant for replica in self._replicas if not replica.alive}
        self._hooks.succeeded(self._endpoint)

    def _miss(self, why: str, *, silent: bool) -> None:
        self._missed += 1
        if self._missed >= self._misses_to_be_lost:
            self._known.why = f"unreachable: {why}"
            if silent:
                for replica in self._replicas:
                    replica.lose(why)
        self._hooks.failed(self._endpoint, why)
