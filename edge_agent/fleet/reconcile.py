"""What to do about a `desired` document: a pure difference between what is wanted and what the device knows.

`reconcile` answers with actions, `remember` folds the outcome of an action back into the knowledge. Doing both until no
action is left is idempotent: the same document again asks for nothing but the same report.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from router.fleetwire.documents import MAX_FIRST_VERSION, MAX_VERSION_JUMP, DesiredConfig, digest_of

MAX_ATTEMPTS = 2
"""An agent that ended this often while it applied a document does not try that document again."""


class Verdict(enum.Enum):
    """What became of a document."""

    APPLIED = "applied"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Handled:
    """The document with the highest version that was dealt with, and how."""

    version: int
    digest: str
    verdict: Verdict
    reason: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """A document whose application was begun. Still there after a restart, it tells that the agent ended in it."""

    version: int
    digest: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Knowledge:
    """All a device remembers about its configuration, in memory and on disk.

    Attributes:
        applied: the last good document: in force while the agent lives, and again after a restart.
        handled: None before the first document.
        retry: the agent was started anew since `handled` was refused, so that one more try is fair.
    """

    applied: DesiredConfig | None = None
    handled: Handled | None = None
    trial: Trial | None = None
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Apply:
    """Put a document into force; `trial` is to be on disk before it begins."""

    desired: DesiredConfig
    trial: Trial


@dataclass(frozen=True, slots=True)
class Refuse:
    """Leave the configuration as it is, remember that the document was dealt with, and say why."""

    version: int
    digest: str
    reason: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """A document of a version that is not its turn: leave everything as it is, forget it, and say why."""

    version: int
    digest: str
    reason: str
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Say again what is known."""


Action = Apply | Refuse | Drop | Report


def reconcile(known: Knowledge, desired: DesiredConfig) -> Action:
    """Decide what to do about a document that was decoded without complaint."""
    digest = digest_of(desired)
    handled = known.handled
    if handled is not None and desired.version < handled.version:
        return Drop(
            desired.version,
            digest,
            f"version {desired.version} is stale: version {handled.version} was handled before, so what is in force "
            f"stays; publish {handled.version + 1} or higher (`overspill fleet republish`)",
            stale=True,
        )
    highest = handled.version + MAX_VERSION_JUMP if handled is not None else MAX_FIRST_VERSION
    if desired.version > highest:
        before = f"version {handled.version} was handled before" if handled is not None else "none was handled before"
        return Drop(
            desired.version,
            digest,
            f"version {desired.version} is out of reach: {before}, at most {highest} is accepted now; "
            f"publish {handled.version + 1 if handled is not None else 1}",
        )
    if handled is not None and desired.version == handled.version:
        if digest != handled.digest:
            return Drop(
                desired.version,
                digest,
                f"conflict: version {desired.version} was handled before with other content; "
                f"publish {handled.version + 1} or higher",
            )
        if handled.verdict is Verdict.APPLIED or not known.retry:
            return Report()
    attempts = known.trial.attempts if known.trial is not None and known.trial.digest == digest else 0
    if attempts >= MAX_ATTEMPTS:
        return Refuse(
            desired.version,
            digest,
            f"the agent ended {attempts} times while it applied version {desired.version}; publish a higher version",
        )
    return Apply(desired, Trial(desired.version, digest, attempts + 1))


def begin(known: Knowledge, action: Apply) -> Knowledge:
    """Return what to have on disk before `action` is carried out."""
    return replace(known, trial=action.trial)


def applied(known: Knowledge, desired: DesiredConfig) -> Knowledge:
    """Return the knowledge after a document came into force."""
    handled = Handled(desired.version, digest_of(desired), Verdict.APPLIED)
    return replace(known, applied=desired, handled=handled, trial=None, retry=False)


def refused(known: Knowledge, refusal: Refuse) -> Knowledge:
    """Return the knowledge after a document was refused; the last good one stays in force."""
    handled = Handled(refusal.version, refusal.digest, Verdict.REFUSED, refusal.reason, refusal.key)
    return replace(known, handled=handled, trial=None, retry=False)


def restarted(known: Knowledge) -> Knowledge:
    """Return the knowledge as a new life of the agent begins with it."""
    return replace(known, retry=True)
