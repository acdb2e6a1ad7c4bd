"""A canary behind the real dispatcher: its share, its sessions, its step back, and that nobody is lost by any of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from router.base.errors import Unavailable
from router.dispatch.dispatcher import Dispatcher
from router.signals.canary import Canary, Side
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import ChatPrompt
from router.values.request import InferenceRequest
from router.values.settings import CanarySettings, DeploymentPattern, QualityProbe, RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import FakeReplica, info, request

NEXT = CanarySettings(name="next", canary=DeploymentPattern(backend="new"), weight=0.1)


class Deployments:
    """Three replicas of a stable deployment and one of a canary, and their dispatcher."""

    def __init__(self, clock: VirtualClock, canary: CanarySettings, **settings: Any) -> None:
        self.clock = clock
        self.old = [FakeReplica(_info(f"old-{n}", "old"), clock, 8, answer_tokens=4) for n in range(3)]
        self.new = FakeReplica(_info("new-0", "new"), clock, 8, answer_tokens=4)
        self.dispatcher = Dispatcher([*self.old, self.new], RouterSettings(canary=(canary,), **settings), clock=clock)

    @property
    def canary(self) -> Canary:
        (canary,) = self.dispatcher._signals.canaries
        return canary

    async def ask(self, number: int, **changes: Any) -> str:
        running = await self.dispatcher.start(request(self.clock, request_id=f"n{number}", **changes))
        return "".join([chunk.text async for chunk in running.chunks])

    async def send(self, numbers: range) -> list[str]:
        """Send requests, eight at a time; returns their texts."""
        texts: list[str] = []
        for begin in range(numbers.start, numbers.stop, 8):
            some = range(begin, min(begin + 8, numbers.stop))
            texts += await self.clock.run(_together([self.ask(n) for n in some]))
        return texts

    def metrics(self, name: str) -> dict[tuple[str, ...], float]:
        families = self.dispatcher.telemetry.registry.collect()
        return {tuple(s.labels.values()): s.value for f in families for s in f.samples if s.name == name}


async def _together(asks: list[Any]) -> list[str]:
    return list(await asyncio.gather(*asks))


def _info(name: str, backend: str) -> Any:
    return info("fp32", replica_id=f"{name}/tiny-fp32", endpoint=f"http://{name}", device=name, backend=backend)


@contextlib.asynccontextmanager
async def deployments(canary: CanarySettings = NEXT, **settings: Any) -> AsyncIterator[Deployments]:
    made = Deployments(VirtualClock(), canary, **settings)
    async with made.dispatcher:
        yield made


async def test_a_canary_gets_its_share_and_its_sessions_and_the_record_says_so() -> None:
    async with deployments() as d:
        await d.send(range(400))
        assert 20 <= len(d.new.sent) <= 60
        assert d.canary.why == ""
        chat = next(f"s{n}" for n in range(100) if d.canary.side_of(request(d.clock, session=f"s{n}")) is Side.CANARY)
        before = len(d.new.sent)
        for number in range(5):
            await d.clock.run(d.ask(1_000 + number, session=chat))
        assert len(d.new.sent) == before + 5
        record = d.dispatcher.explain("n1000")
        assert record is not None
        assert (record.canary.name, record.canary.side, record.canary.stepped_back) == ("next", "canary", None)
        assert {row.rejected for row in record.candidates if row.replica.startswith("old")} == {"canary"}
        assert d.metrics("overspill_canary_weight") == {("next",): 0.1}


async def test_one_request_in_twenty_that_fails_steps_it_back_before_a_hundred_reached_it_and_none_is_lost() -> None:
    async with deployments() as d:
        d.new.faults = ([None] * 19 + [("break", 2)]) * 20
        with capture_logs() as logs:
            texts = await d.send(range(800))
        assert len(d.new.sent) < 100
        assert set(texts) == {"w0 w1 w2 w3 "}
        assert d.canary.by == "errors"
        told = [entry for entry in logs if entry["event"] == "canary stepped back"]
        assert [(entry["canary"], entry["test"]) for entry in told] == [("next", "errors")]
        assert d.metrics("overspill_canary_weight") == {("next",): 0.0}
        assert d.metrics("overspill_canary_step_backs_total") == {("next", "errors"): 1.0}
        record = d.dispatcher.explain("n799")
        assert record is not None
        assert record.canary.stepped_back == d.canary.why
        (row,) = [row for row in record.candidates if row.rejected == "canary"]
        assert row.replica == "new-0/tiny-fp32"
        assert "stepped back: errors" in row.why


async def test_one_that_is_three_times_slower_steps_back_before_a_hundred_reached_it() -> None:
    async with deployments() as d:
        d.new.slower = 3.0
        await d.send(range(800))
        assert d.canary.by in {"ttft", "pace"}
        assert len(d.new.sent) < 100


async def test_the_other_deployment_serves_who_has_no_other_way_unless_it_stepped_back() -> None:
    async with deployments(max_wait_ms=500.0) as d:
        d.new.available = False
        assert len(await d.send(range(60))) == 60
        assert not d.new.sent
        d.new.available = True
        for replica in d.old:
            replica.available = False
        assert len(await d.send(range(100, 120))) == 20
        assert len(d.new.sent) == 20
        d.canary.why = "errors"
        d.dispatcher._binder.pool.redraw()
        with pytest.raises(Unavailable, match="switched off"):
            await d.clock.run(d.ask(999))
        assert len(d.new.sent) == 20


async def test_a_new_table_is_in_force_at_once_and_one_that_is_gone_divides_nobody() -> None:
    async with deployments() as d:
        all_of_them = msgspec.structs.replace(NEXT, weight=1.0)
        d.dispatcher.reconfigure(RouterSettings(canary=(all_of_them,)))
        await d.send(range(20))
        assert len(d.new.sent) == 20
        d.dispatcher.reconfigure(RouterSettings())
        await d.send(range(100, 140))
        record = d.dispatcher.explain("n120")
        assert record is not None
        assert record.canary is None
        assert not [row for row in record.candidates if row.rejected]


async def test_quality_probes_ask_both_deployments_and_step_a_bad_one_back() -> None:
    probe = QualityProbe(prompt="What is 6 times 7?", expect=r"\b42\b", max_tokens=8)
    settings = msgspec.structs.replace(NEXT, probes=(probe,), probe_interval_ms=1_000.0)
    async with deployments(settings) as d:
        asked: list[str] = []

        def says(replica: FakeReplica, text: str) -> None:
            async def generate(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
                assert isinstance(request.prompt, ChatPrompt)
                asked.append(replica.info.backend)
                yield TokenChunk(text, 1)
                yield TokenChunk("", 0, finish_reason=FinishReason.STOP)

            replica.generate = generate  # type: ignore[method-assign]

        for replica in d.old:
            says(replica, "It is 42.")
        says(d.new, "It is 24.")
        await d.clock.advance(60.0)
        assert d.canary.by == "probes"
        assert asked.count("new") == asked.count("old") < 20, "and nobody is asked after that"
        assert d.metrics("overspill_requests_total") == {}
