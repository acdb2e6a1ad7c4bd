"""Promises for a machine that others load too: within the usual ones a step down, or the other tier, would be right."""

from __future__ import annotations

import msgspec

from router.values.settings import RouterSettings

TTFT_MS = 60_000.0
PATIENT = {"x-overspill-ttft-slo-ms": "60000", "x-overspill-tpot-slo-ms": "10000"}
"""Headers of a request in no hurry."""


def unhurried(settings: RouterSettings | None = None) -> RouterSettings:
    """Return settings under which a request that promises nothing has a minute, unless they say otherwise."""
    given = settings or RouterSettings()
    if given.ttft_slo_ms != RouterSettings().ttft_slo_ms:
        return given
    return msgspec.structs.replace(given, ttft_slo_ms=TTFT_MS)
