"""How many tokens a sequence of a device should have got by now: the integral of the predicted pace.

    round = sum over the rungs that decode of step(their batch)      seconds in which every sequence gets one token
    d tokens / dt = 1 / round while nothing prefills, share / round while something does

An answer's batch changes while it runs, with each that joins or ends. What it got, against what this clock says it
should have got, is the error of the steps alone: no mean of batches stands between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final


@final
class Mark:
    """Where a device's clock stood at a sequence's first token.

    Attributes:
        alone_tokens, beside_tokens: elapsed while nothing prefilled, and while something did.
        steps: by replica, the part of the elapsed rounds that its steps took.
    """

    __slots__ = ("alone_tokens", "at_s", "beside_tokens", "steps")

    def __init__(self, at_s: float, alone_tokens: float, beside_tokens: float, steps: dict[str, float]) -> None:
        self.at_s = at_s
        self.alone_tokens = alone_tokens
        self.beside_tokens = beside_tokens
        self.steps = steps


@dataclass(slots=True)
class TokenClock:
    """The clock of one device.

    Attributes:
        decoding: replica id → sequences that decode, of this tier.
        foreign: replica id → sequences that others run there, as its last report told.
        prefilling: requests that were sent and have no first token yet.
    """

    decoding: dict[str, int] = field(default_factory=dict)
    foreign: dict[str, int] = field(default_factory=dict)
    prefilling: int = 0
    at_s: float = 0.0
    alone_tokens: float = 0.0
    beside_tokens: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)

    def advance(self, now_s: float, step_s: Callable[[str, int], float]) -> None:
        """Run to `now_s`; call it before anything changes.

        Args:
            step_s: predicts the step of a replica at a batch.
        """
        passed_s, self.at_s = now_s - self.at_s, now_s
        if passed_s <= 0 or not self.decoding:
            return
        steps = {name: step_s(name, count + self.foreign.get(name, 0)) for name, count in self.decoding.items()}
        round_s = sum(steps.values())
        tokens = passed_s / round_s
        if self.prefilling:
            self.beside_tokens += tokens
        else:
            self.alone_tokens += tokens
        for name, own_s in steps.items():
            self.steps[name] = self.steps.get(name, 0.0) + tokens * own_s / round_s

    def began(self, name: str) -> Mark:
        """A sequence's first token came."""
        self.decoding[name] = self.decoding.get(name, 0) + 1
        return Mark(self.at_s, self.alone_tokens, self.beside_tokens, dict(self.steps))

    def ended(self, name: str) -> None:
        """A sequence that had begun ended."""
        left = self.decoding.get(name, 0) - 1
        if left > 0:
            self.decoding[name] = left
        else:
            self.decoding.pop(name, None)

    def shares(self, mark: Mark) -> dict[str, float]:
        """Return which part of the rounds since `mark` each replica's steps took; they add up to 1."""
        spent = {name: took - mark.steps.get(name, 0.0) for name, took in self.steps.items()}
        whole = sum(spent.values())
        return {name: took / whole for name, took in spent.items() if took > 0} if whole > 0 else {}
