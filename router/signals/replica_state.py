"""What predictions on one replica have in common at one moment, whatever the request: computed once, then reused."""

# ruff: noqa: PLR1730, FURB136 - done for every candidate of every decision, where each call of `max` counts
from __future__ import annotations

import math
from collections.abc import Sequence

from router.signals.learnt import FIGURES_LAST_S, Device, Speeds
from router.signals.occupancy import backlog_tokens, left_tokens, occupied_slots
from router.signals.upper import NORMAL_90, band_of
from router.values.link import LinkSnapshot
from router.values.prediction import InFlightLoad, SiblingLoad
from router.values.replica import ReplicaSnapshot


class ReplicaState:
    """See the module; the first seven say for which moment it was computed.

    Attributes:
        version: of what was learnt of its device.
        at_s: of the oldest figures in it; it stands as long as those.
        own: its sequences, those queued inside it included.
        position: how many answers have to end before a request starts, 0 or less: none.
        band: of the device's occupancy with the request.
        network_s: round trip, and a new connection where one is needed; uplink_bytes_per_s: infinite on this host.
        line_a_s, line_b_s: seconds until the first token, and for each token of its own prompt, as it will be.
        backlog_s: for what is to be prefilled before it; behind_s: the part of other rungs; scale: of a batch.
        alone_a_s, alone_b_s: the same on an idle device.
        pace_spread: square of the 0.9 quantile of log errors of its pace.
        idle_since_s: when it last taught anything, while it has no request; infinity while it has one.
    """

    __slots__ = (
        "_waited",
        "alone_a_s",
        "alone_b_s",
        "at_s",
        "backlog_s",
        "band",
        "behind_s",
        "device",
        "finish_factor",
        "idle_since_s",
        "line_a_s",
        "line_b_s",
        "link",
        "mine",
        "network_s",
        "own",
        "pace_high_s",
        "pace_s",
        "pace_sigma",
        "pace_spread",
        "position",
        "prefill_sigma",
        "scale",
        "siblings",
        "slots",
        "snapshot",
        "token_device_s",
        "ttft_factor",
        "uplink_bytes_per_s",
        "version",
        "wait_factor",
        "wait_high",
    )

    def __init__(
        self,
        snapshot: ReplicaSnapshot,
        link: LinkSnapshot | None,
        mine: InFlightLoad,
        siblings: Sequence[SiblingLoad],
        *,
        learnt: tuple[Speeds, Device, Sequence[Speeds]],
        now_s: float,
    ) -> None:
        """Compute the state of a replica.

        Args:
            siblings: the other rungs of its device that have sequences.
            learnt: of it, of its device, and of each sibling.
        """
        speeds, device, others = learnt
        own_slots, own = snapshot.slots or 1, occupied_slots(snapshot, mine)
        figures = speeds.figures(now_s)
        scale = 1.0 + figures.slope * (own if own < own_slots else own_slots - 1)
        occupied, slots, at_s, behind_s, pace_s = own, own_slots, figures.at_s, 0.0, figures.step_s * scale
        overdue = 1.0 if mine.awaited is None else mine.awaited.overdue(now_s)
        for index, sibling in enumerate(siblings):
            theirs = others[index].figures(now_s)
            occupied += sibling.occupied
            if sibling.slots > slots:
                slots = sibling.slots
            if theirs.at_s < at_s:
                at_s = theirs.at_s
            pace_s += theirs.step_s * (1.0 + theirs.slope * (sibling.running - 1))
            behind_s += theirs.b_s * sibling.prefill_tokens
            if sibling.awaited is not None:
                overdue = max(overdue, sibling.awaited.overdue(now_s))
        over, own_over = occupied - slots, own - own_slots
        position = (over if over > own_over else own_over) + 1
        band = band_of(occupied + 1, slots, waits=position > 0)
        factors = device.factors(band)
        pace_s *= factors.pace_bias
        if link is not None:
            pace_s = max(pace_s, link.token_s(occupied + 1))
        bias, spread_log = factors.ttft_bias * overdue, NORMAL_90 * device.pace_sigma
        line_b_s = bias * figures.b_s * scale
        self.snapshot, self.link = snapshot, link
        self.mine, self.siblings, self.own = mine, siblings, own
        self.device, self.version = device, device.version
        self.at_s, self.idle_since_s = at_s, math.inf if mine.requests else speeds.seen_s
        self.position, self.slots, self.band = position, slots, band
        self.network_s = 0.0 if link is None else link.rtt_s + link.setup_s
        self.uplink_bytes_per_s = math.inf if link is None else link.uplink_bytes_per_s
        self.line_a_s, self.line_b_s = bias * figures.a_s, line_b_s
        self.backlog_s = line_b_s * backlog_tokens(snapshot, mine) + bias * behind_s
        self.behind_s, self.scale = behind_s, scale
        self.alone_a_s, self.alone_b_s = figures.a_s, figures.b_s
        self.pace_s, self.pace_high_s = pace_s, pace_s * factors.pace_high
        self.ttft_factor, self.finish_factor = factors.ttft_high, factors.finish_high
        self.wait_factor, self.wait_high = factors.wait, factors.wait_high
        self.token_device_s = figures.step_s * (1.0 + figures.slope * (slots - 1)) / slots
        self.prefill_sigma, self.pace_sigma = figures.prefill_sigma, device.pace_sigma
        self.pace_spread = spread_log * spread_log
        self._waited: list[int] | None = None

    def stands(
        self,
        snapshot: ReplicaSnapshot,
        link: LinkSnapshot | None,
        mine: InFlightLoad,
        siblings: Sequence[SiblingLoad],
        now_s: float,
    ) -> bool:
        """Whether it was computed for these very objects, a moment ago."""
        return (
            self.snapshot is snapshot
            and self.mine is mine
            and self.link is link
            and (self.siblings is siblings or self.siblings == siblings)
            and self.holds(now_s)
        )

    def holds(self, now_s: float) -> bool:
        """Whether nothing was learnt since, and hardly any time has passed: of the same objects it is as it was."""
        return self.version == self.device.version and now_s - self.at_s <= FIGURES_LAST_S

    def until_free_s(self, position: int, answer_s: float) -> float:
        """Time until the `position`-th answer ends; after those that run, whole answers of `answer_s` follow."""
        left = self._waited
        if left is None:
            left = list(left_tokens(self.snapshot, self.mine, self.own))
            for sibling in self.siblings:
                left += sibling.left_tokens
            left.sort()
            self._waited = left
        if position <= len(left):
            return left[position - 1] * self.pace_s
        first_s = left[-1] * self.pace_s if left else 0.0
        return first_s + (position - len(left)) / self.slots * answer_s
