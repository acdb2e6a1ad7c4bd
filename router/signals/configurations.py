"""Which rung each device had better run: whichever would have earned most of those who came lately.

Rungs of one device that run side by side slow one another, so a device had better run one. Which one depends on how
many come, in what bursts, and on what they ask for. So the newcomers are also sent to imagined tiers (`shadow.py`), one
for each configuration, with predicted times and drawn lengths, and all of them with the same chance (common random
numbers). Their gains fade; the tier follows the leader (Hannan, 1957), with a margin that grows as the noise of a
gain does, and which is wider for a step up in quality than for a step down.

Until they have seen enough, and a little always, what a configuration could sustain at the present rate counts as well:

    sustained = Σ over devices of min(its share of the arrivals, 1 / (rate · cost)) · value    an arrival of a family

A configuration gives a level to the devices of this tier and one to those behind the upstream: level k is a device's
k-th best rung of a family, or its last. Before anybody has asked it is the last: what comes first, at once, to a tier
of which nothing is known, would hold the large rungs' slots longest just when most is to be learnt. Whoever meets an
idle tier, and should have it for itself, is served by the best rung whatever is favoured (`Situation.calm`).
Families that share no device are imagined apart (`what_if.py`).
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from router.signals.shadow import Drawn, ShadowTier
from router.values.offer import Ask, Offer
from router.values.replica import ReplicaInfo

_FADE: Final = 0.985  # of the gains, at each arrival
_FADE_S: Final = 120.0
_FORGET_S: Final = 30.0  # nobody came: what follows is another time, and the best rungs serve it first
# Lead of a step up in quality, and of one down: of √(¼ + the gain of the one that is left).
_UP: Final = 1.2
_DOWN: Final = 0.4
_MOST_LEVELS: Final = 4
# Arrivals that what can be sustained counts for.
_SUSTAINED_FIRST: Final = 40
_SUSTAINED_ALWAYS: Final = 20
_RATE_OF: Final = 32  # arrivals
_RATE_FROM: Final = 3
_MEAN_OF: Final = 200  # arrivals

Place = tuple[str, str]
"""A device, and a family of models that it serves."""
_Levels = tuple[int, int]


@dataclass(slots=True)
class _Rung:
    """One replica, as offered lately: means over the requests that it could serve.

    Attributes:
        quality: by which the rungs of a device are ordered.
        value: mean of value · P(kept).
    """

    place: Place
    local: bool
    quality: float
    cost_s: float = 0.0
    value: float = 0.0
    seen: int = 0

    def offered(self, offer: Offer) -> None:
        self.seen += 1
        gain = 1.0 / min(self.seen, _MEAN_OF)
        self.cost_s += gain * (offer.cost_s - self.cost_s)
        self.value += gain * (offer.value * offer.kept - self.value)


class Configurations:
    """Imagines some families of models, and the devices that serve them. One writer.

    Attributes:
        version: counts changes of what is favoured.
    """

    def __init__(self) -> None:
        self.version = 0
        self._rungs: dict[str, _Rung] = {}
        self._tiers: dict[_Levels, ShadowTier] = {}
        self._of_family: dict[str, list[tuple[str, _Rung]]] = {}  # with their replicas, those of one device together
        self._levels: _Levels = (0, 0)
        self._favoured: Mapping[Place, str] = {}
        self._seen = 0
        self._at_s = 0.0
        self._arrivals_s: dict[str, deque[float]] = {}  # by family

    @property
    def has_a_choice(self) -> bool:
        """Whether there is more than one configuration: else there is nothing to imagine."""
        return len(self._tiers) > 1

    def arrived(self, now_s: float, ask: Ask, chance: random.Random) -> None:
        """Take a newcomer into account, that somebody could serve.

        Args:
            chance: draws its length and the noise of its times.
        """
        for offer in ask.offers:
            rung = self._rungs.get(offer.replica_id)
            if rung is not None:  # else it has left since
                rung.offered(offer)
        self._seen += 1
        self._arrivals_s.setdefault(ask.offers[0].family, deque(maxlen=_RATE_OF)).append(now_s)
        if now_s - self._at_s > _FORGET_S:
            self._levels = (0, 0)
            self._build()
        fade = _FADE * math.exp(-(now_s - self._at_s) / _FADE_S)
        self._at_s = now_s
        drawn = Drawn(
            ask,
            now_s,
            float(round(ask.length.quantile(chance.random()))),
            math.exp(chance.gauss(0.0, ask.prefill_log_sigma)),
            math.exp(chance.gauss(0.0, ask.pace_log_sigma)),
        )
        for tier in self._tiers.values():
            tier.gain *= fade
            tier.arrive(drawn, now_s)
        self._follow()

    def arrivals_per_s(self, family: str, now_s: float) -> float:
        """How many came lately for a family, a second, until now; 0 before there were a few."""
        arrivals_s = self._arrivals_s.get(family)
        if arrivals_s is None or len(arrivals_s) < _RATE_FROM:
            return 0.0
        return len(arrivals_s) / max(now_s - arrivals_s[0], 1e-3)

    def favoured(self) -> Mapping[Place, str]:
        """The rung of each family that each device had better run."""
        return self._favoured

    def set_replicas(self, infos: Iterable[ReplicaInfo]) -> None:
        """Imagine these from now on, and forget those that are gone and what was imagined with them."""
        rungs: dict[str, _Rung] = {}
        for info in infos:
            name, rung = info.replica_id, _Rung((info.device_key, info.family), not info.remote, info.quality)
            known = self._rungs.get(name)
            same = known is not None and (known.place, known.quality) == (rung.place, rung.quality)
            rungs[name] = known if known is not None and same else rung
        if rungs != self._rungs:
            self._rungs = rungs
            self._build()

    def _build(self) -> None:
        """Imagine all configurations anew, of the devices that are known."""
        by_place: dict[Place, list[str]] = {}
        for name, rung in sorted(self._rungs.items(), key=lambda item: -item[1].quality):
            by_place.setdefault(rung.place, []).append(name)
        local = {place: self._rungs[names[0]].local for place, names in by_place.items()}
        depth = [
            min(max([len(names) for place, names in by_place.items() if local[place] is side], default=1), most)
            for side, most in ((True, _MOST_LEVELS), (False, _MOST_LEVELS))
        ]
        self._tiers = {
            (here, there): ShadowTier(
                {
                    place: names[min(here if local[place] else there, len(names) - 1)]
                    for place, names in by_place.items()
                }
            )
            for here, there in itertools.product(range(depth[0]), range(depth[1]))
        }
        self._of_family = {}
        for (_, family), names in by_place.items():
            self._of_family.setdefault(family, []).extend([(name, self._rungs[name]) for name in names])
        levels = self._levels if self._seen else (_MOST_LEVELS, _MOST_LEVELS)
        self._favour((min(levels[0], depth[0] - 1), min(levels[1], depth[1] - 1)))

    def _favour(self, levels: _Levels) -> None:
        self._levels, self._favoured = levels, self._tiers[levels].rungs
        self.version += 1

    def _follow(self) -> None:
        """Follow the leader, if it leads clearly."""
        counts_for = max(_SUSTAINED_FIRST - self._seen, _SUSTAINED_ALWAYS)
        rates = {
            family: (len(arrivals_s) - 1) / max(arrivals_s[-1] - arrivals_s[0], 1e-3)
            for family, arrivals_s in self._arrivals_s.items()
            if len(arrivals_s) >= _RATE_FROM and self._at_s - arrivals_s[-1] <= _FORGET_S
        }
        best_first = {family: sorted(self._of_family.get(family, ()), key=_value_of, reverse=True) for family in rates}
        score = {
            at: tier.gain + counts_for * _sustained(best_first, tier.runs, rates) for at, tier in self._tiers.items()
        }
        leader = max(score, key=lambda levels: score[levels])
        up = sum(leader) < sum(self._levels)
        margin = (_UP if up else _DOWN) * math.sqrt(0.25 + self._tiers[self._levels].gain)
        if leader != self._levels and score[leader] >= score[self._levels] + margin:
            self._favour(leader)


def _sustained(
    best_first: Mapping[str, Sequence[tuple[str, _Rung]]], runs: frozenset[str], rates: Mapping[str, float]
) -> float:
    """Value an arrival that a configuration can go on to earn, each family's most valuable devices first.

    Args:
        best_first: by family, its rungs by value.
        runs: the replicas that devices run.
        rates: arrivals a second of each family, by which it counts; a family of which few came is not there.
    """
    if not rates:
        return 0.0
    value = 0.0
    for family, rate in rates.items():
        left = 1.0
        for name, rung in best_first[family]:
            if rung.seen and name in runs:
                part = min(left, 1.0 / max(rung.cost_s * rate, 1e-9))
                value += part * rung.value * rate
                left -= part
    return value / sum(rates.values())


def _value_of(rung: tuple[str, _Rung]) -> float:
    return rung[1].value
