"""One replica as the decisions of one moment see it, and how those of one device stand to one another."""

from __future__ import annotations

from collections.abc import Sequence

from router.dispatch.records.record import ReplicaLoad
from router.signals.health import Health
from router.signals.occupancy import occupied_slots, sibling_load
from router.signals.replica_state import ReplicaState
from router.values.link import LinkSnapshot
from router.values.prediction import InFlightLoad, SiblingLoad
from router.values.replica import Replica, ReplicaSnapshot
from router.values.task import GENERATES


class ReplicaView:
    """One replica as it stands now, shared by the decisions of one moment.

    Attributes:
        name: its id, at hand for each decision.
        mine: what this tier has sent there.
        own: its sequences.
        load: for the decision record.
        blocked: it is not available, or its health speaks against some requests.
        open_to_all: it is not blocked, and its server does all that a generation may need, and nothing else.
        metered: bytes on its link cost money.
        as_sibling: its load as the other rungs of its device meet it, None where it has no sequences.
        siblings: the other rungs of its device that have sequences.
        occupied, slots: of its device.
        room: a slot is free, its own and its device's.
        kv_room: tokens for which its KV cache has room; None where it does not tell, or none would be made by waiting.
        favoured, peak_latency_s: as in `Candidate`.
        state: what predictions on it have in common, None before the first.
    """

    __slots__ = (
        "as_sibling",
        "blocked",
        "favoured",
        "health",
        "info",
        "kv_room",
        "link",
        "load",
        "metered",
        "mine",
        "name",
        "occupied",
        "open_to_all",
        "own",
        "peak_latency_s",
        "replica",
        "room",
        "siblings",
        "slots",
        "snapshot",
        "state",
    )

    def __init__(
        self, replica: Replica, snapshot: ReplicaSnapshot, link: LinkSnapshot | None, health: Health, mine: InFlightLoad
    ) -> None:
        self.replica = replica
        self.info = snapshot.info
        self.name = snapshot.info.replica_id
        self.snapshot = snapshot
        self.link = link
        self.mine = mine
        self.own = own = occupied_slots(snapshot, mine)
        self.load: ReplicaLoad = (snapshot, link)
        self.metered = link is not None and link.price_per_byte > 0.0
        self.meets(health)
        self.as_sibling: SiblingLoad | None = None
        self.siblings: tuple[SiblingLoad, ...] = ()
        self.occupied = 0
        self.slots = 0
        self.room = False
        self.kv_room: int | None = None
        if own and snapshot.kv_free_tokens is not None and snapshot.credits is None:
            self.kv_room = snapshot.kv_free_tokens - mine.unopened_prefill_tokens
        self.favoured = True
        self.peak_latency_s = 0.0
        self.state: ReplicaState | None = None

    def meets(self, health: Health) -> None:
        """Take its health, which changes while its load stands."""
        self.health = health
        self.blocked = bool(health.code) or not self.snapshot.available
        self.open_to_all = not self.blocked and not self.info.lacks and self.info.tasks is GENERATES


def relate(views: Sequence[ReplicaView]) -> None:
    """Say how the views of one device stand to one another."""
    busy: list[SiblingLoad] = []
    if len(views) > 1:
        for view in views:
            if view.own and view.as_sibling is None:
                view.as_sibling = sibling_load(view.snapshot, view.mine, view.own)
            if view.as_sibling is not None:
                busy.append(view.as_sibling)
    for view in views:
        siblings = tuple([load for load in busy if load is not view.as_sibling]) if busy else ()
        if siblings != view.siblings:
            view.siblings, view.state = siblings, None
        snapshot, occupied = view.snapshot, view.own
        slots = own_slots = snapshot.slots
        for sibling in siblings:
            occupied += sibling.occupied
            slots = max(slots, sibling.slots)
        view.occupied, view.slots = occupied, slots
        credits_left = snapshot.credits  # they count what waits there, and what others send
        view.room = view.own < own_slots and occupied < slots if credits_left is None else credits_left > 0
