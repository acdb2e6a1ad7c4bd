"""Newcomers on their way into the imagined tiers: each after its own decision, and before the next one's."""

from __future__ import annotations

import asyncio
from collections import deque

import structlog

from router.policy.protocol import Policy
from router.signals.what_if import WhatIf
from router.values.situation import Situation

log = structlog.get_logger("router")


class Imagining:
    """Lets what newcomers met into the imagined tiers (`router.signals.what_if`).

    Attributes:
        policy: says what they ask; replaced when the tier's is.
    """

    def __init__(self, policy: Policy, what_if: WhatIf) -> None:
        self.policy = policy
        self._what_if = what_if
        self._waiting: deque[Situation] = deque()

    def soon(self, situation: Situation) -> None:
        """Let a newcomer in as soon as the loop gets to it: its own decision does not wait for that."""
        if self._what_if.has_a_choice:
            self._waiting.append(situation)
            asyncio.get_running_loop().call_soon(self.now)

    def now(self) -> None:
        """Let in who waits."""
        while self._waiting:
            situation = self._waiting.popleft()
            try:
                ask = self.policy.ask(situation)
                if ask is not None:
                    self._what_if.arrived(situation.now_s, ask)
            except Exception:  # what is imagined concerns no request
                log.exception("imagining crashed")
