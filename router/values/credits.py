"""Credits of admission: what a tier lets each instance of the tiers below send, and until when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Asker:
    """One running process of a tier below: an edge agent, as far as its tier above can tell.

    Attributes:
        caller: digest of its API key, empty where the tier has no keys.
        instance: what it calls itself since its start; made up at random, so that it names no hardware.
        may_hurry: its key may claim priorities above 0, so that it may use the reserve.
    """

    caller: str
    instance: str
    may_hurry: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """Requests that wait at the asker for a credit, `urgent` of them of a priority above 0."""

    waiting: int = 0
    urgent: int = 0


NOTHING_WANTED = Want()


@dataclass(frozen=True, slots=True)
class Grant:
    """What one load report says to one asker. All times are relative: no two clocks agree.

    Attributes:
        credits: requests that it may send in addition to what was granted before.
        for_s: so long, from the moment it asked; unused ones are void then.
        again_s: it should ask again after so long.
        wait_s: so long until it may expect a credit, were it to want one.
    """

    credits: int = 0
    for_s: float = 0.0
    again_s: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Room:
    """What a tier can take now.

    Attributes:
        slots: sequences that its devices run at once; free: those that nobody has.
        waiting: requests in its own queue and inside replicas that have no slot.
    """

    slots: int
    free: int
    waiting: int
