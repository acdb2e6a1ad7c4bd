"""What every policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.values.choice import Choice, Hopeless
from router.values.offer import Offer
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

    def offers(self, situation: Situation) -> Sequence[Offer]:
        """Say what a newcomer is worth on each replica, for the price of contended capacity; nothing where unused."""
        ...


class Unpriced:
    """A policy that does not ask what capacity is worth."""

    locality = Locality.ANY

    def offers(self, situation: Situation) -> Sequence[Offer]:  # noqa: ARG002
        return ()
