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

    Devices that are online go first, at most `parallel` at a time, and each is waited for. Then those that are not:
    their documents wait at the broker, and nobody waits for them here.

    Attributes:
        max_refused: begin no further device once so many refused the change; None for no limit.
        wait_s: for the word of an online device; 0 does not wait at all.
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
    def stopped(self) -> bool:
        """Whether so many devices refused that no further one is begun."""
        refused = sum(change.outcome is not None and change.outcome.kind == "refused" for change in self.changes)
        return self.max_refused is not None and refused >= self.max_refused

    async def _all(self, operator: FleetOperator, changes: Sequence[Change]) -> None:
        turns = iter(changes)
        await asyncio.gather(*(self._take_turns(operator, turns) for _ in range(min(self.parallel, len(changes)))))

    async def _take_turns(self, operator: FleetOperator, turns: Iterator[Change]) -> None:
        for change in turns:
            if self.stopped:
                return
            proposal = self._draft(change)
            if proposal is None:
                continue
            try:
                await operator.publish(proposal)
            except BrokerError as error:
                change.outcome = Outcome("unpublished", error.message)
                continue
            if self.wait_s > 0 and change.view.online:
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
