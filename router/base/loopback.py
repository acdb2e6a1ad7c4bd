"""Addresses: how URLs write them, which only this machine can reach, and which web pages it served."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

_MAX_CHARS = 64  # no address is longer; what is kept for later is bounded


def in_url(host: str) -> str:
    """Write a name or an address, with or without brackets, as a URL has it."""
    return f"[{host.strip('[]')}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Say whether `host`, a name or an address with or without brackets, is this machine and nothing else."""
    return host == "localhost" or (len(host) <= _MAX_CHARS and _is_loopback_address(host))


@lru_cache(1024)
def _is_loopback_address(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def is_local_page(origin: str) -> bool:
    """Say whether a web page of this `origin` was served by this machine."""
    try:
        page = urlsplit(origin)
        host, _ = page.hostname, page.port  # where several are named, the port of the first is no number
    except ValueError:
        return False
    return is_loopback(host or "")
