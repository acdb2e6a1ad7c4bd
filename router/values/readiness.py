"""Whether a tier could answer a request now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Readiness:
    """What load balancers and the tier below are told.

    Attributes:
        why: why nothing could be answered; empty where something could.
        back_in_s: seconds until something should, by the word of who is away; 0 where nobody says.
    """

    why: str = ""
    back_in_s: float = 0.0

    @property
    def ready(self) -> bool:
        return not self.why


READY = Readiness()
