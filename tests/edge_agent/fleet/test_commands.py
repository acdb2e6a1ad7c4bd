"""Commands that get no answer: a flood of them fills no log."""

from __future__ import annotations

from typing import NoReturn

import structlog

from edge_agent.fleet.commands import Responder
from edge_agent.mqtt.connection import Message
from router.fleetwire.topics import Address


async def _unasked() -> NoReturn:
    raise AssertionError("nobody gets an answer")


async def test_a_flood_of_commands_that_cannot_be_answered_is_told_in_a_few_lines() -> None:
    address = Address("lab", "one")
    responder = Responder(address, reported=_unasked, snapshot=_unasked)
    with structlog.testing.capture_logs() as logs:
        for _ in range(1000):
            assert await responder.answer(Message("t", b"{}"), 1) is None
        topic = address.topic("response")
        retained = Message("t", b"{}", retained=True, response_topic=topic, correlation=b"1")
        assert await responder.answer(retained, 1) is None
    assert [line["times"] for line in logs] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1]
    assert topic in logs[0]["why"]
    assert "days old" in logs[-1]["why"]
