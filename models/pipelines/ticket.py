"""One request on its way through the stages of a pipeline: its items, and what became of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.base.errors import OverspillError


@dataclass(eq=False, slots=True)
class Ticket:
    """A request. Its fields are written under the pipeline's lock.

    Attributes:
        due_s: when its answer is worth nothing any more, on the pipeline's clock.
        caller: whose it is; empty where nobody tells callers apart.
        results: of its items that are through, in order; left: how many are not.
        input_bytes: what its inputs take of the memory as they came.
        size_bytes: what these results take of the memory, until the last of them is there.
        error: why it ended without them.
        began_s, ended_s: when it came in, and when the last of it was through.
        over: it is complete, failed, or nobody waits for it.
        done: told on the event loop when it is over.
    """

    size: int
    done: asyncio.Future[None]
    priority: int = 0
    due_s: float = math.inf
    caller: str = ""
    results: list[Any] = field(default_factory=list)
    left: int = 0
    cost: int = 0
    input_bytes: int = 0
    size_bytes: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    error: OverspillError | None = None
    over: bool = False

    def __post_init__(self) -> None:
        self.left = self.size
        self.results = [None] * self.size


@dataclass(eq=False, slots=True)
class Item:
    """One input of a request at a stage.

    Attributes:
        value: what the stage before it made of it.
        cost: its size there, in the unit of the stage's buckets.
        size_bytes: what it takes of the memory.
        rank: its place in its request.
        arrived_s: at this stage.
    """

    ticket: Ticket
    rank: int
    value: Any
    arrived_s: float
    cost: int = 1
    size_bytes: int = 0

    @property
    def priority(self) -> int:
        return self.ticket.priority

    @property
    def due_s(self) -> float:
        return self.ticket.due_s

    @property
    def caller(self) -> str:
        return self.ticket.caller

    @property
    def over(self) -> bool:
        return self.ticket.over


Outcomes = Sequence[tuple[Item, Any]]
"""Items with what came of each: a value, or the error that is its own."""
