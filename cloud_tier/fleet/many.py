"""One change to many devices: whom it means, and how it reaches them a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from cloud_tier.fleet.broker import BrokerError
from cloud_tier.fleet.operator import FleetOperator
from cloud_tier.fleet.survey import Survey
from cloud_tier.fleet.view import OR_UNREADABLE, DeviceView, Outcome, Proposal, absence, draft, judge
from router.base import timers
from router.base.errors import ConfigError, OverspillError
from router.fleetwire.documents import OVERRIDABLE
from router.fleetwire.topics import Address


class NothingSeen(OverspillError):
    """A pattern means no device that can be seen."""

    code = "nothing_seen"


def is_pattern(word: str) -> bool:
    """Whether a word means every device that matches it; no device's name holds one of these marks."""
    return any(mark in word for mark in "*?[")


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take what an operator typed apart: devices and patterns, then assignments.

    Raises:
        ConfigError: an assignment without its `=`, or a device behind an assignment.
    """
    count = next((at for at, word in enumerate(words) if "=" in word), len(words))
    devices, assignments = list(words[:count]), list(words[count:])
    forgotten = [word for word in devices[1:] if word.partition(".")[0] in OVERRIDABLE]
    for word in (*forgotten, *(word for word in assignments if "=" not in word)):
        raise ConfigError(f"{word!r} is no assignment; write key=value, such as router.max_queue=32")
    return devices, assignments


def choose(views: Mapping[str, DeviceView], words: Sequence[str], *, unseen: bool = False) -> list[str]:
    """Return the devices that names and patterns mean, sorted. A name means its device whether it was seen or not.

    Args:
        unseen: patterns also match devices that never connected, when a document waits for them.

    Raises:
        NothingSeen: a pattern matches no device.
        ConfigError: a name is not valid.
    """
    chosen: set[str] = set()
    for word in words:
        if is_pattern(word):
            matching = [name for name, view in views.items() if fnmatchcase(name, word) and (unseen or view.seen)]
            if not matching:
                raise NothingSeen(f"no device that was ever seen matches {word!r}, {OR_UNREADABLE}")
            chosen.update(matching)
        else:
            chosen.add(word)
    return sorted(chosen)


def to_read(fleet: str, words: Iterable[str]) -> list[str] | None:
    """Return the devices to read for these words, None for all of the fleet.

    Raises:
        ConfigError: a name is not valid.
    """
    words = list(words)
    for word in words:
        if not is_pattern(word):
            Address(fleet, word)
    return None if any(map(is_pattern, words)) else words


@dataclass(slots=True)
class Change:
    """What one device shall do, and what became of it; no proposal if none could be made or it was not its turn."""

    view: DeviceView
    proposal: Proposal | None = None
    outcome: Outcome | None = None

    @property
    def device(self) -> str:
        return self.view.address.device

    @property
    def begun(self) -> bool:
        return self.proposal is not None or self.outcome is not None


@dataclass(slots=True)
class ManyChanges:
    """One change to many devices.

    Devices that are online go first: their documents are published, `parallel` at a time, and their words are counted
    as they come. Then those that are not: their documents wait at the broker, and nobody waits for them here.

    With `max_refused` they are published in waves, each when the words about the one before are in: `parallel` devices
    first, and twice as many as before while nobody refuses.

    Attributes:
        parallel: publishes that wait for the broker at the same time; devices of the first wave.
        max_refused: begin no further device once so many refused the change; None for no limit, and one wave.
        wait_s: for the word of an online device, from its publish on; 0 does not wait at all.
    """

    survey: Survey
    devices: Sequence[str]
    edits: Mapping[str, Any]
    replace: bool = False
    issued_by: str = ""
    parallel: int = 32
    max_refused: int | None = None
    wait_s: float = 10.0
    changes: list[Change] = field(init=False)
    _interrupted: bool = False

    def __post_init__(self) -> None:
        self.changes = [Change(self.survey.view(device)) for device in self.devices]

    def plan(self) -> None:
        """Draft every document and publish none."""
        for change in self.changes:
            self._draft(change)

    async def run(self, operator: FleetOperator) -> None:
        """Publish everything and wait; what happens to one device keeps no other from its turn."""
        try:
            await self._all(operator, [change for change in self.changes if change.view.online])
            await self._all(operator, [change for change in self.changes if not change.begun])
        except asyncio.CancelledError:
            self._interrupted = True
            raise
        finally:
            self._conclude()

    @property
    def refused(self) -> int:
        """Devices that refused the change."""
        return sum(change.outcome is not None and change.outcome.kind == "refused" for change in self.changes)

    @property
    def stopped(self) -> bool:
        """Whether so many devices refused that no further one is begun."""
        return self.max_refused is not None and self.refused >= self.max_refused

    async def _all(self, operator: FleetOperator, changes: Sequence[Change]) -> None:
        size = len(changes) if self.max_refused is None else self.parallel
        begun = 0
        while begun < len(changes) and not self.stopped:
            refused = self.refused
            await self._wave(operator, changes[begun : begun + size])
            begun += size
            if self.refused == refused:
                size *= 2

    async def _wave(self, operator: FleetOperator, wave: Sequence[Change]) -> None:
        """Publish to all of them, and wait for the word of each that is online."""
        turns = iter(wave)
        words: list[asyncio.Task[None]] = []
        publishing = [
            asyncio.create_task(self._publish_in_turn(operator, turns, words), name="fleet-publish")
            for _ in range(min(self.parallel, len(wave)))
        ]
        try:
            await asyncio.gather(*publishing)
            await asyncio.gather(*words)
        finally:
            await timers.end(*publishing, *words)

    async def _publish_in_turn(
        self, operator: FleetOperator, turns: Iterator[Change], words: list[asyncio.Task[None]]
    ) -> None:
        for change in turns:
            proposal = self._draft(change)
            if proposal is None:
                continue
            try:
                await operator.publish(proposal)
            except BrokerError as error:
                change.outcome = Outcome("unpublished", error.message)
                continue
            if self.wait_s > 0 and change.view.online:
                words.append(asyncio.create_task(self._word_of(change, proposal), name=f"fleet-word {change.device}"))

    async def _word_of(self, change: Change, proposal: Proposal) -> None:
        try:
            change.outcome = await self.survey.outcome(change.device, proposal.desired, self.wait_s)
        except BrokerError as error:
            change.outcome = Outcome("timeout", error.message)

    def _draft(self, change: Change) -> Proposal | None:
        try:
            change.proposal = draft(change.view, self.edits, replace=self.replace, issued_by=self.issued_by)
        except ConfigError as error:
            change.outcome = Outcome("unpublished", error.message)
        return change.proposal

    def _conclude(self) -> None:
        """Say what became of those that nobody waited for, and of those whose turn never came."""
        for change in self.changes:
            if change.outcome is not None:
                continue
            if change.proposal is None:
                why = "interrupted" if self._interrupted else f"{self.max_refused} devices had refused the change"
                change.outcome = Outcome("unpublished", f"not begun: {why}")
            elif self.wait_s > 0:
                view = change.view
                outcome = judge(change.proposal.desired, view.reported) if view.reported is not None else None
                why = "interrupted before its word came" if self._interrupted else absence(view)
                change.outcome = outcome or Outcome("timeout", why, reported=view.reported)
