"""What the broker keeps about one device, and what follows from it: its state, the next document, a verdict. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from router.base.errors import ConfigError
from router.fleetwire.documents import (
    MAX_FIRST_VERSION,
    MAX_VERSION,
    MAX_VERSION_JUMP,
    BadDocument,
    DesiredConfig,
    DesiredRefused,
    Reported,
    Status,
    decode_as,
    decode_desired,
    digest_of,
    encode,
    newest_status,
)
from router.fleetwire.overrides import edit
from router.fleetwire.topics import Address, Leaf

OR_UNREADABLE = "or the access list does not let you read it"
UNREADABLE = f"nothing can be read here: this device never connected, {OR_UNREADABLE}"


@dataclass(slots=True)
class DeviceView:
    """What the broker keeps about one device.

    Attributes:
        desired_error: why the retained desired document cannot be read, empty if it can.
    """

    address: Address
    desired: DesiredConfig | None = None
    desired_error: str = ""
    reported: Reported | None = None
    status: Status | None = None

    def take(self, leaf: Leaf, payload: bytes) -> None:
        """Fold one message in; an unreadable `reported` or `status` is left out."""
        if leaf == "desired":
            self.desired, self.desired_error = None, ""
            try:
                self.desired = decode_desired(payload) if payload else None
            except DesiredRefused as error:
                self.desired_error = error.message
        with suppress(BadDocument):
            if leaf == "reported":
                self.reported = decode_as(payload, Reported) if payload else None
            elif leaf == "status":
                self.status = newest_status(self.status, decode_as(payload, Status)) if payload else None

    @property
    def online(self) -> bool:
        return self.status is not None and self.status.state == "online"

    @property
    def seen(self) -> bool:
        """Whether the device itself ever said anything that can still be read."""
        return self.status is not None or self.reported is not None

    @property
    def kept(self) -> tuple[Leaf, ...]:
        """The topics that hold a retained message."""
        held: dict[Leaf, bool] = {
            "desired": self.desired is not None or bool(self.desired_error),
            "reported": self.reported is not None,
            "status": self.status is not None,
        }
        return tuple(leaf for leaf, holds in held.items() if holds)

    @property
    def connection(self) -> str:
        """`online`, `offline`, `never` for a device that was never seen, `unknown` if only its status is missing."""
        if self.status is not None:
            return self.status.state
        return "unknown" if self.seen else "never"

    @property
    def state(self) -> str:
        """What became of the document that is desired: as reported, or `waiting` while the device has not read it.

        `stale` is one below what the device has dealt with: a broker that crashed serves what it had saved before.
        """
        if self.desired_error:
            return "unreadable"
        reported, desired = self.reported, self.desired
        if desired is not None and (reported is None or reported.version != desired.version):
            if desired.version > self.handled_version:
                return "waiting"
            if desired.version < self.handled_version:
                return "stale"
        return reported.state if reported is not None else "none"

    @property
    def converged(self) -> bool:
        """Whether what is desired is in force."""
        if self.desired is None:
            return not self.desired_error
        return self.reported is not None and self.reported.applied_digest == digest_of(self.desired)

    @property
    def astray(self) -> bool:
        """Whether the broker no longer keeps the document that is in force on the device."""
        lost = self.desired is None and not self.desired_error and self.reported is not None
        return self.state == "stale" or (lost and bool(self.reported and self.reported.applied_version))

    @property
    def handled_version(self) -> int:
        """The version that the next document has to pass, as far as the device says."""
        reported = self.reported
        if reported is None:
            return 0
        if reported.handled_version >= 0:
            return reported.handled_version
        return max(reported.version or 0, reported.applied_version or 0)

    @property
    def highest_version(self) -> int:
        """The highest version anyone is known to have used, and the device would take."""
        handled, desired = self.handled_version, self.desired
        reach = handled + MAX_VERSION_JUMP if handled else MAX_FIRST_VERSION
        return max(handled, desired.version) if desired is not None and desired.version <= reach else handled

    @property
    def base(self) -> dict[str, Any]:
        """The overrides a change begins from: those desired, or those in force where the device does not obey them."""
        reported, desired = self.reported, self.desired
        if reported is None:
            return desired.overrides if desired is not None else {}
        refused = reported.state == "refused" and (
            desired is None or reported.version is None or reported.version >= desired.version
        )
        if desired is None or refused or self.state == "stale":
            return dict(reported.overrides)
        return desired.overrides


OutcomeKind = Literal["applied", "volatile", "refused", "conflict", "superseded", "timeout", "unpublished"]


_UNOBEYED: dict[str, OutcomeKind] = {"refused": "refused", "partial": "refused", "stale": "superseded"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a desired document; `reason` is for people."""

    kind: OutcomeKind
    reason: str = ""
    key: str = ""
    reported: Reported | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A document; `fresh` unless it was desired already, so that there is nothing to publish."""

    desired: DesiredConfig
    fresh: bool
    view: DeviceView


def draft(view: DeviceView, edits: Mapping[str, Any], *, replace: bool = False, issued_by: str = "") -> Proposal:
    """Merge edits into what is desired of a device, as the next version, unless nothing would change.

    Args:
        edits: a tree as `edits.read_edits` makes it; None takes an override away.
        replace: begin from no overrides at all.

    Raises:
        ConfigError: the document would break the schema.
    """
    overrides = edit({} if replace else view.base, edits)
    current = view.desired
    if current is not None and current.overrides == overrides and not _worth_repeating(view):
        return Proposal(current, fresh=False, view=view)
    if view.highest_version >= MAX_VERSION:
        device = view.address.device
        raise ConfigError(
            f"device {device}: version {MAX_VERSION} is used up; stop the agent and remove its state_dir/desired.json"
        )
    desired = DesiredConfig(
        version=view.highest_version + 1,
        issued_at=dt.datetime.now(dt.timezone.utc),
        issued_by=issued_by[:128],
        **overrides,
    )
    return Proposal(decode_desired(encode(desired)), fresh=True, view=view)  # checked as strictly as the device will


def judge(desired: DesiredConfig, reported: Reported) -> Outcome | None:
    """Return what a report says about a document; None if it does not settle the matter yet."""
    digest = digest_of(desired)
    if reported.applied_digest == digest:
        volatile = reported.state == "applied-volatile"
        return Outcome("volatile" if volatile else "applied", reported.reason if volatile else "", reported=reported)
    if reported.digest == digest:
        kind = _UNOBEYED.get(reported.state)
        if kind == "refused" and reported.applied_version == desired.version:
            kind = "conflict"
        return Outcome(kind, reported.reason, reported.key, reported) if kind is not None else None
    if reported.version == desired.version:
        reason = f"another operator published version {desired.version} at the same time, and it came first"
        return Outcome("conflict", reason, reported=reported)
    newest = max(reported.handled_version, reported.applied_version or 0)
    if newest > desired.version:
        return Outcome("superseded", f"the device is already at version {newest}", reported=reported)
    return None


def absence(view: DeviceView) -> str:
    """Say why a device gave no word about a document, as far as anyone can tell."""
    if not view.seen:
        device = view.address.device
        return (
            f"no device of this name has ever connected, {OR_UNREADABLE}; "
            "the document waits for it at the broker. "
            f"Mistyped? `overspill fleet forget {device}` takes the document back"
        )
    if not view.online:
        since = f" since {view.status.at}" if view.status is not None else ""
        return f"the device is offline{since}; it will read the document when it is back"
    if view.reported is not None and view.reported.state == "applying":
        return "the device is still applying it"
    return "the device is online and says nothing; its log may tell why"


def _worth_repeating(view: DeviceView) -> bool:
    """Whether publishing the same overrides as a new version can change anything."""
    reported, desired = view.reported, view.desired
    if reported is None or desired is None:
        return False
    return reported.state in {"refused", "partial"} or view.state == "stale" or view.highest_version > desired.version
