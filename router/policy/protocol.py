"""What every policy is."""

from __future__ import annotations

from typing import Protocol

from router.values.choice import Choice, Hopeless
from router.values.offer import Ask
from router.values.request import Locality
from router.values.situation import Situation


class Policy(Protocol):
    """Ranks; never sends, never waits.

    Attributes:
        locality: replicas beyond it are no candidates for any request, so that they neither serve nor stand in the way.
    """

    locality: Locality

    def decide(self, situation: Situation) -> Choice | Hopeless:
        """Choose a candidate, or say that there is no hope."""
        ...

    def ask(self, situation: Situation) -> Ask | None:
        """Say what a newcomer asks and is offered, for imagined tiers (`router.signals.what_if`); None where unused."""
        ...


class WithoutWhatIf:
    """A policy that favours no rung of a device."""

    locality = Locality.ANY

    def ask(self, situation: Situation) -> Ask | None:  # noqa: ARG002
        return None
