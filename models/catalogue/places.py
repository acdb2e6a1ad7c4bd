"""Which catalogue model it is that another server calls by one of its names."""

from __future__ import annotations

from collections.abc import Callable

from models.catalogue.families import Catalogue
from router.values.replica import Place


def places_in(catalogue: Catalogue) -> Callable[[str], Place | None]:
    """Return a look-up: from a family, a variant or a repository of the hub to its place, None for any other name.

    A family and its repository stand for its best rung: what a server makes of those weights is not known here.
    """
    found: dict[str, Place] = {}
    for family in catalogue:
        found[family.name] = Place(family.name)
        for source in family.sources:
            scheme, _, rest = source.uri.partition(":")
            if scheme == "hf":
                found.setdefault(rest.partition("@")[0], Place(family.name))
        for variant in family.variants:
            found[variant.name] = Place(family.name, variant.rung, variant.quality)
    return found.get
