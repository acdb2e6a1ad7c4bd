"""What a server refuses as the caller's mistake is not put to others that are known to be like it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.base.errors import ContextTooLong, InvalidRequest, ModelNotFound
from router.dispatch.dispatcher import Dispatcher
from router.values.settings import RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import FakeReplica, World, answer, info, world


def server(clock: VirtualClock, name: str, *faults: Any, **changes: Any) -> FakeReplica:
    own: dict[str, Any] = {"replica_id": name, "endpoint": f"http://{name}", "device": name, "context_tokens": 2048}
    return FakeReplica(info("int8", remote=True, **{**own, **changes}), clock, faults=list(faults))


@contextlib.asynccontextmanager
async def tier(clock: VirtualClock, *servers: FakeReplica) -> AsyncIterator[World]:
    async with Dispatcher(list(servers), RouterSettings(policy="least-load"), clock=clock) as dispatcher:
        first, last = servers[0], servers[-1]
        yield World(clock, first, last, first, last, dispatcher)


def asked(*servers: FakeReplica) -> int:
    return sum(len(one.sent) for one in servers)


async def test_one_server_of_a_backend_speaks_for_all_of_them() -> None:
    clock = VirtualClock()
    pod = [server(clock, f"pod-{n}", "invalid", backend="pod") for n in range(3)]
    async with tier(clock, *pod) as w:
        with pytest.raises(InvalidRequest, match="not for me") as caught:
            await clock.run(w.ask(max_tokens=8))
        assert (asked(*pod), caught.value.attempts) == (1, 1)
        assert set(w.dispatcher.breaker_states().values()) == {"closed"}
        _, text = await clock.run(w.ask(max_tokens=8))
        assert text == answer(8), "the next request is served"


async def test_the_other_rungs_of_the_tier_that_refused_are_not_asked() -> None:
    async with world() as w:
        w.cloud.faults, w.cloud_small.faults = ["invalid"], ["invalid"]
        with pytest.raises(InvalidRequest):
            await w.clock.run(w.ask(max_tokens=8, locality="cloud-only"))
        assert asked(w.cloud, w.cloud_small) == 1


@pytest.mark.parametrize(
    "differs",
    [{"backend": "other"}, {"backend": "pod", "version": "2"}, {"backend": "pod", "context_tokens": 8192}],
    ids=["another backend", "another version", "a longer window"],
)
async def test_a_server_that_is_known_to_differ_is_asked(differs: dict[str, Any]) -> None:
    clock = VirtualClock()
    refusing = server(clock, "pod-0", "invalid", backend="pod")
    other = server(clock, "pod-1", **differs)
    other.others = 2  # the least loaded is asked first
    async with tier(clock, refusing, other) as w:
        _, text = await clock.run(w.ask(max_tokens=8))
        assert (text, asked(refusing), asked(other)) == (answer(8), 1, 1)


async def test_a_shorter_window_is_not_tried_where_a_longer_one_was_too_short() -> None:
    clock = VirtualClock()
    long = server(clock, "pod-0", ContextTooLong("too long"), backend="pod", context_tokens=8192)
    short = server(clock, "pod-1", backend="pod")
    short.others = 2
    async with tier(clock, long, short) as w:
        with pytest.raises(ContextTooLong):
            await clock.run(w.ask(max_tokens=8))
        assert asked(short) == 0


async def test_a_server_that_has_lost_its_model_speaks_for_itself_alone() -> None:
    clock = VirtualClock()
    lost, other = server(clock, "pod-0", ModelNotFound("gone"), backend="pod"), server(clock, "pod-1", backend="pod")
    other.others = 2
    async with tier(clock, lost, other) as w:
        _, text = await clock.run(w.ask(max_tokens=8))
        assert (text, asked(lost), asked(other)) == (answer(8), 1, 1)
