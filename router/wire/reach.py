"""Which tiers a tier reaches, told to the tier below: `x-overspill-reach: <instance>=0, <instance>=1`.

The first is the tier itself; each of the others goes by the name that it made up at its start, with the links that
lead to it. Tiers that are each other's upstream would else count one another's figures as their own, a few slots more
at each poll, and call one another ready when nobody serves any more. So none tells who asks what leads back to it (the
split horizon of routing protocols). The name of a tier that is gone may go round among others, but is further away
each time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from router.wire.headers import MAX_HOPS

Reach = Mapping[str, int]
"""Instance to links; no request goes further than `MAX_HOPS`."""

_ENTRY = re.compile(r"([A-Za-z0-9_-]{8,64})=([0-9]{1,2})")
_MOST_TIERS = 200
_MOST_CHARS = 16 * 1024


def beyond(instance: str, above: Iterable[Reach]) -> dict[str, int]:
    """Return what a tier of this name reaches through those above it, itself included; of very many the nearest."""
    found: dict[str, int] = {}
    for reach in above:
        for name, links in reach.items():
            if links < MAX_HOPS:
                found[name] = min(found.get(name, MAX_HOPS), links + 1)
    return _nearest({**found, instance: 0})


def encode_reach(reach: Reach) -> str:
    return ", ".join(f"{name}={links}" for name, links in sorted(reach.items(), key=_links))


def decode_reach(told: str) -> Reach:
    """Return what another tier tells; what of it cannot be read is left out, and of very many the farthest."""
    entries = told[:_MOST_CHARS].split(",")
    found = [match for entry in entries if (match := _ENTRY.fullmatch(entry.strip())) is not None]
    return _nearest({match[1]: int(match[2]) for match in found if int(match[2]) <= MAX_HOPS})


def _nearest(reach: dict[str, int]) -> dict[str, int]:
    """Leave out the farthest: what is told has to fit into the headers of a reply, and hops end what goes round."""
    return reach if len(reach) <= _MOST_TIERS else dict(sorted(reach.items(), key=_links)[:_MOST_TIERS])


def _links(entry: tuple[str, int]) -> int:
    return entry[1]
