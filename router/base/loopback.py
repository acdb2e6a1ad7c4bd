"""Which addresses only this machine can reach, and which web pages it served."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Say whether `host`, a name or an address with or without brackets, is this machine and nothing else."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def is_local_page(origin: str) -> bool:
    """Say whether a web page of this `origin` was served by this machine."""
    try:
        return is_loopback(urlsplit(origin).hostname or "")
    except ValueError:
        return False
