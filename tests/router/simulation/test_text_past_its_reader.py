"""Text that goes past its reader in a simulation wakes nobody and changes no row, as in a live tier."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator

import msgspec
import pytest

from router.simulation import replica
from router.simulation.answer_stream import Serves, stream_of
from router.simulation.experiment import Experiment, requests_for
from router.simulation.replica import SimReplica
from router.simulation.run import simulate
from router.simulation.values import SimRequest
from router.simulation.world import Cut, DeadReplica, Faults, PowerMode, World, two_tiers
from router.values.chunk import TokenChunk
from router.values.replica import Give
from router.values.request import InferenceRequest

FAULTS = Faults(
    cut=(Cut(device="cloud", from_s=6.0, to_s=20.0),),
    dead_replica=(DeadReplica(device="edge", from_s=25.0, to_s=40.0),),
    power_mode=(PowerMode(device="edge", from_s=45.0, to_s=60.0, speed=0.4),),
)


def asked(mix: str, load: float) -> tuple[SimRequest, ...]:
    return requests_for(Experiment(two_tiers(), "azure-conv", mix, (), (load,), 1, 120), load, 1)


def with_caches(world: World) -> World:
    return msgspec.structs.replace(
        world, devices=tuple(msgspec.structs.replace(device, kv_tokens=20_000) for device in world.devices)
    )


def in_chats(requests: tuple[SimRequest, ...]) -> list[SimRequest]:
    """Begin every three prompts alike, so that caches have something to find."""
    return [
        dataclasses.replace(request, token_ids=tuple(range(9_000 * (i // 3), 9_000 * (i // 3) + request.prompt_tokens)))
        for i, request in enumerate(requests)
    ]


@pytest.mark.parametrize("policy", ["slo-utility", "quality-in-objective", "threshold"])
@pytest.mark.parametrize("load", [0.9, 3.0])
def test_rows_are_the_same_as_where_every_piece_wakes_its_reader(
    load: float, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = with_caches(msgspec.structs.replace(two_tiers(), faults=FAULTS))
    requests = in_chats(asked("mixture", load))
    settings = msgspec.structs.replace(world.router, policy=policy)
    past = simulate(world, requests, settings, seed=5)
    assert sum(row.tokens for row in past.rows) > 500, "there was text to compare"
    monkeypatch.delattr(SimReplica, "push")
    assert simulate(world, requests, settings, seed=5) == past


def test_only_the_first_and_the_last_piece_wake_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer comes in a dozen pieces."""
    read: list[int] = []

    async def counted(serves: Serves, request: InferenceRequest, give: Give | None) -> AsyncIterator[TokenChunk]:
        async with contextlib.aclosing(stream_of(serves, request, give)) as chunks:
            async for chunk in chunks:
                read.append(chunk.tokens)
                yield chunk

    monkeypatch.setattr(replica, "stream_of", counted)
    row = simulate(two_tiers(), [SimRequest(0.0, 100, 400)], seed=1).rows[0]
    assert (row.tokens, row.whole) == (400, True)
    assert len(read) == 2
    assert read[0] == 1
