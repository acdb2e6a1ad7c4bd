"""Whether any replica of a tier could take a request now: what the tier tells load balancers, and the tier below."""

from __future__ import annotations

from router.dispatch.assessment.rejections import within
from router.dispatch.replicas.pool import Pool
from router.values.readiness import READY, Readiness
from router.values.replica import ReplicaSnapshot


def readiness_of(pool: Pool, asker: str = "") -> Readiness:
    """Return whether a replica that the tier's policy may choose calls itself available.

    Breakers do not count: they are about single requests, and open and close by themselves within seconds.

    Args:
        asker: the instance of the tier that asks: what leads back to it does not count.
    """
    found = pool.load(asker)
    able = [seen for seen in found if within(pool.locality, seen.info)]
    if any(seen.available for seen in able):
        return READY
    told = [_why(seen) for seen in able]  # without names of models: anybody may ask
    told += [f"{source.who}: {source.text}" for source in pool.sources() if source.within(pool.locality)]
    if not found and pool.replicas:
        told.insert(0, "all that is behind leads back to the tier that asks")
    if not told and found:
        told = [f"the policy `{pool.settings.policy}` keeps to {pool.locality.value}, and no replica is there"]
    back_in_s = min((seen.back_in_s for seen in able if seen.back_in_s > 0), default=0.0)
    return Readiness("; ".join(dict.fromkeys(told)) or "no model is served here, and nothing is behind", back_in_s)


def _why(seen: ReplicaSnapshot) -> str:
    why = seen.why or "not available"
    return f"backend {seen.info.backend}: {why}" if seen.info.backend else why
