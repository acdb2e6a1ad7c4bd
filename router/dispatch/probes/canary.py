"""Quality probes: an operator's prompts, asked of both deployments of a canary by turns; see `router.signals.canary`.

They go past the queue, one at a time, to a replica that has room, and count as nobody's request. A probe that either
side cannot answer at all tells nothing: errors are the requests' own test.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import structlog

from router.base.alarms import Alarm, Alarms
from router.base.clock import Clock
from router.base.errors import OverspillError
from router.base.timers import end
from router.dispatch.attempts.stream import AttemptStream, Elapsed, Unaccounted
from router.signals.canary import Canaries, Canary, Side
from router.values.prompt import ChatPrompt, Message
from router.values.replica import Replica
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import QualityProbe

log = structlog.get_logger("router")

_LIMIT_S = 60.0


class CanaryProbes:
    """The probes of a tier's canaries; `begin` once it serves, `close` at its end.

    Args:
        replicas: of the tier, as they are now.

    Attributes:
        running: `begin` was called, and nothing has ended it.
    """

    def __init__(
        self, canaries: Canaries, clock: Clock, alarms: Alarms, replicas: Callable[[], Mapping[str, Replica]]
    ) -> None:
        self._canaries = canaries
        self._clock = clock
        self._alarms = alarms
        self._replicas = replicas
        self._due: dict[str, Alarm] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = count(1)
        self.running = False

    def begin(self) -> None:
        """Probe from now on, all canaries that have probes; call it again when they have changed."""
        self.running = True
        for alarm in self._due.values():
            alarm.cancel()
        self._due.clear()
        for canary in self._canaries:
            self._next(canary, 0)

    def stop(self) -> None:
        """Begin none from now on; one that runs goes on until `close`."""
        self.running = False
        for alarm in self._due.values():
            alarm.cancel()
        self._due.clear()

    async def close(self) -> None:
        self.stop()
        await end(*self._tasks)

    def _next(self, canary: Canary, turn: int) -> None:
        settings = canary.settings
        if not self.running or not settings.probes or canary.why or canary not in list(self._canaries):
            return

        def ring() -> None:
            task = asyncio.create_task(self._round(canary, turn), name=f"probe of canary {settings.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._due[settings.name] = self._alarms.set(self._clock.now_s() + settings.probe_interval_ms / 1e3, ring)

    async def _round(self, canary: Canary, turn: int) -> None:
        probes = canary.settings.probes
        probe = probes[turn % len(probes)]
        try:
            good = {}
            for side in Side:
                replica = self._one_of(canary, side, turn)
                answer = None if replica is None else await self._ask(replica, probe)
                if answer is None:
                    return
                good[side] = re.search(probe.expect, answer) is not None
            if good[Side.CANARY] is not good[Side.STABLE]:
                names = {f"{side.value}_passed": passed for side, passed in good.items()}
                log.info("quality probe", canary=canary.settings.name, probe=turn % len(probes), **names)
            self._canaries.probed(canary, canary_good=good[Side.CANARY], stable_good=good[Side.STABLE])
        except Exception:  # a probe's own failure: the next one is still asked
            log.exception("quality probe crashed", canary=canary.settings.name)
        finally:
            self._next(canary, turn + 1)

    def _one_of(self, canary: Canary, side: Side, turn: int) -> Replica | None:
        """Return a replica of a side that has room, another one each time; None where there is none."""
        there: Sequence[Replica] = [r for r in self._replicas().values() if canary.side_at(r.info) is side]
        for at in range(len(there)):
            replica = there[(turn + at) % len(there)]
            snapshot = replica.snapshot()
            if snapshot.available and snapshot.running < snapshot.slots:
                return replica
        return None

    async def _ask(self, replica: Replica, probe: QualityProbe) -> str | None:
        """Return the answer's text, None where there is none."""
        request = InferenceRequest(
            request_id=f"quality-probe-{next(self._ids)}",
            model=replica.info.variant,
            prompt=ChatPrompt((Message("user", probe.prompt),)),
            sampling=SamplingParams(max_tokens=probe.max_tokens, temperature=0.0),
            objective=Objective(),
            prompt_tokens=max(1, len(probe.prompt) // 3),
            prompt_bytes=len(probe.prompt.encode()),
            accepted_at_s=self._clock.now_s(),
            attempts_left=1,
        )
        text: list[str] = []
        due_s = self._clock.now_s() + _LIMIT_S
        try:
            async with AttemptStream(Unaccounted(replica), request, self._clock, self._alarms) as stream:
                while True:
                    chunk = await stream.next(due_s)
                    text.append(chunk.text)
                    if chunk.finish_reason is not None:
                        return "".join(text)
        except (OverspillError, Elapsed, StopAsyncIteration) as error:
            log.info("quality probe unanswered", replica=replica.info.replica_id, why=str(error) or "it ended early")
            return None
