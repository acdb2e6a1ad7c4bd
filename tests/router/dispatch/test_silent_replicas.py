"""A replica that falls silent is told as that: who, for how long, and which key says how long is too long."""

from __future__ import annotations

import pytest

from router.base.errors import ReplicaBroken, ReplicasFailed
from tests.support.router_fakes import answer, info, world

_FIRST = r"(failed for this request: )?no first token within 7 s \(`router.first_token_timeout_ms`\)"


async def test_a_replica_without_a_first_token_is_told_as_silent_where_no_other_is_there() -> None:
    async with world(remote=False, first_token_timeout_ms=7000.0) as w:
        w.local.faults = ["hang"]
        with pytest.raises(ReplicasFailed, match=f"local/tiny-int8: {_FIRST}"):
            await w.clock.run(w.ask(max_tokens=8, model="tiny-int8"))
        w.nothing_is_held()


async def test_every_silent_replica_is_named_where_several_were_tried() -> None:
    async with world(remote=False, first_token_timeout_ms=7000.0, max_attempts=2) as w:
        w.local.faults, w.small.faults = ["hang"], ["hang"]
        with pytest.raises(ReplicasFailed, match=f"the last: local/tiny-[a-z0-9-]*: {_FIRST}"):
            await w.clock.run(w.ask(max_tokens=8))


async def test_an_answer_that_stands_still_says_for_how_long() -> None:
    async with world(remote=False, stall_timeout_ms=3000.0) as w:
        w.local.faults = [("stall", 2)]
        w.small.available = False
        told = r"tiny-int8: failed for this request: silent for 3 s in its answer \(`router.stall_timeout_ms`\)"
        with pytest.raises(ReplicaBroken, match=told):
            await w.clock.run(w.ask(max_tokens=8))
        _, text = await w.clock.run(w.ask(max_tokens=8))
        assert text == answer(8)


async def test_the_address_of_a_backends_server_is_not_told() -> None:
    async with world(remote=False, first_token_timeout_ms=7000.0) as w:
        w.local.info = info("int8", replica_id="pod@10.0.0.7:8000/tiny-int8", backend="pod")
        w.dispatcher.set_replicas([w.local])
        w.local.faults = ["hang"]
        with pytest.raises(ReplicasFailed, match=f"pod/tiny-int8: {_FIRST}") as caught:
            await w.clock.run(w.ask(max_tokens=8, model="tiny-int8"))
        assert "10.0.0.7" not in str(caught.value)
