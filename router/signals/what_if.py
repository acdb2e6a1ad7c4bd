"""Which rung of each family each device had better run: families that share no device choose apart.

What many ask of one model is no reason to step down with another that has devices of its own. Families that share a
device slow one another, so they are imagined together (`configurations.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from router.signals.configurations import Configurations, Place
from router.values.offer import Ask
from router.values.replica import ReplicaInfo


class WhatIf:
    """Imagines. One writer, the dispatcher.

    Attributes:
        version: counts changes of what is favoured.
        has_a_choice: any family has more than one configuration: else there is nothing to imagine.
    """

    def __init__(self) -> None:
        self.version = 0
        self.has_a_choice = False
        self._chance = random.Random(0)  # noqa: S311 - a simulation's chance, not a secret
        self._together: dict[frozenset[str], Configurations] = {}
        self._of: dict[str, Configurations] = {}  # by family

    def arrived(self, now_s: float, ask: Ask) -> None:
        """Take a newcomer into account; one that no replica could serve says nothing."""
        configurations = self._of.get(ask.offers[0].family) if ask.offers else None
        if configurations is not None and configurations.has_a_choice:
            version = configurations.version
            configurations.arrived(now_s, ask, self._chance)
            self.version += configurations.version - version

    def arrivals_per_s(self, family: str, now_s: float) -> float:
        """How many came lately for a family, a second, until now; 0 before there were a few."""
        configurations = self._of.get(family)
        return 0.0 if configurations is None else configurations.arrivals_per_s(family, now_s)

    def favours(self, device: str, family: str, replica_id: str) -> bool:
        """Whether a device had better run that rung of a family; True where nothing speaks against it."""
        configurations = self._of.get(family)
        return configurations is None or configurations.favoured().get((device, family), replica_id) == replica_id

    def favoured(self) -> Mapping[Place, str]:
        """The rung of each family that each device had better run."""
        return {place: rung for one in self._together.values() for place, rung in one.favoured().items()}

    def set_replicas(self, infos: Iterable[ReplicaInfo]) -> None:
        """Imagine these from now on, and forget those that are gone and what was imagined with them."""
        groups = _sharing_devices(infos)
        if groups.keys() != self._together.keys():
            self.version += 1
        self._together = {families: self._together.get(families, Configurations()) for families in groups}
        self._of = {family: self._together[families] for families in groups for family in families}
        for families, members in groups.items():
            version = self._together[families].version
            self._together[families].set_replicas(members)
            self.version += self._together[families].version - version
        self.has_a_choice = any(configurations.has_a_choice for configurations in self._together.values())


def _sharing_devices(infos: Iterable[ReplicaInfo]) -> Mapping[frozenset[str], list[ReplicaInfo]]:
    """Return the replicas by the families that share devices with theirs, directly or through others."""
    groups: list[tuple[set[str], set[str], list[ReplicaInfo]]] = []
    for info in infos:
        families, devices, members = {info.family}, {info.device_key}, [info]
        apart = []
        for group in groups:
            if families.isdisjoint(group[0]) and devices.isdisjoint(group[1]):
                apart.append(group)
            else:
                families |= group[0]
                devices |= group[1]
                members = [*group[2], *members]
        groups = [*apart, (families, devices, members)]
    return {frozenset(families): members for families, _, members in groups}
