"""Asks a running tier how it is."""

from __future__ import annotations

from router.base.json_input import UNREADABLE
from router.client.tier import TierAddress
from router.values.status import TierStatus, decode


def ask(address: TierAddress) -> TierStatus:
    """Return what `GET /v1/status` tells.

    Raises:
        ConfigError: `--ca-file` cannot be used.
        ReplicaUnreachable: nothing answers there, or no tier of Overspill does.
        Unauthenticated: the tier does not know the key.
    """
    reply = address.get("/v1/status")
    if reply.status_code == 404:
        raise address.stranger()
    if reply.status_code != 200:
        raise address.odd(reply)
    try:
        return decode(reply.content)
    except UNREADABLE as error:
        raise address.stranger() from error
