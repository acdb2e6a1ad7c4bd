"""`[media]`: from where the servers behind a tier may be sent to fetch what a request links to.

A link is opened by the server that runs the model, in the operator's network: whoever may write one may have it ask
whatever that network lets it reach. So none is passed on but to places that the operator names.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

import msgspec

from router.base.errors import InvalidRequest
from router.values.prompt import ChatPrompt, Input, MediaPart
from router.values.task import PassedCall

_HOST = r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\]"
_ALLOWED = re.compile(rf"https?://(?:\*\.)?(?:{_HOST})(?::[0-9]{{1,5}})?")
_LINK = re.compile(rf"(https?)://({_HOST})\.?(?::([0-9]{{1,5}}))?(?:[/?#][!-\[\]-~]*)?", re.IGNORECASE | re.ASCII)
_INSIDE = ("localhost", "local", "localdomain", "internal", "intranet", "lan", "home", "corp", "private", "arpa")
_UNICAST = ipaddress.IPv6Network("2000::/3")
_PORTS = {"http": "80", "https": "443"}
_SHOWN_CHARS = 120


class MediaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Images and sounds in requests.

    Attributes:
        allow_origins: where links in requests may lead: `https://images.example`, `https://*.example.com` (below it,
            never it itself), or `*` for every public host, which excludes addresses and names of private networks.
            Empty: what is sent as `data:…` alone.
    """

    allow_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        for origin in self.allow_origins:
            if origin != "*" and not _ALLOWED.fullmatch(origin.lower()):
                raise ValueError(
                    f"allow_origins: `{origin[:80]}` is no origin: write scheme, host and port without a path, as in "
                    "https://images.example or https://*.example.com:8443, or `*` for every public host"
                )


class Links:
    """Lets links through, or refuses them."""

    def __init__(self, settings: MediaSettings) -> None:
        self._everywhere = "*" in settings.allow_origins
        allowed = [_with_port(origin.lower()) for origin in settings.allow_origins if origin != "*"]
        self._exact = frozenset(origin for origin in allowed if "*" not in origin)
        self._below = tuple(tuple(origin.split("*", 1)) for origin in allowed if "*" in origin)

    def check(self, prompt: Input) -> None:
        """Check all that a request links to.

        Raises:
            InvalidRequest: it leads where no server is to be sent.
        """
        for link in _links_of(prompt):
            if not self._allows(link):
                shown = link[:_SHOWN_CHARS]
                raise InvalidRequest(
                    f"a link to `{shown}`: this tier has nothing fetched from there; send it as `data:…;base64,…`, or "
                    "have its operator name the origin in media.allow_origins",
                    param="messages" if isinstance(prompt, ChatPrompt) else None,
                )

    def _allows(self, link: str) -> bool:
        found = _LINK.fullmatch(link)
        if found is None:  # a name and a password in it, a backslash: programs differ in which host that is
            return False
        scheme, host, port = found[1].lower(), found[2].lower(), found[3]
        origin = f"{scheme}://{host}:{port or _PORTS[scheme]}"
        if origin in self._exact or (self._everywhere and _public(host)):
            return True
        return any(
            origin.startswith(before) and origin.endswith(after) and len(origin) > len(before) + len(after)
            for before, after in self._below
        )


def _with_port(origin: str) -> str:
    scheme, _, rest = origin.partition("://")
    return origin if re.search(r":[0-9]+$", rest) else f"{origin}:{_PORTS[scheme]}"


def _public(host: str) -> bool:
    """Whether a host is nobody's own, as far as its name tells."""
    last = host.strip("[]").rpartition(".")[2]
    if host.startswith("[") or last.isdigit() or last.startswith("0x"):
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:  # 2130706433, 127.1, 0x7f.0.0.1: an address to some programs
            return False
        return _routed(address)
    return "." in host and last not in _INSIDE


def _routed(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is somebody's on the internet, and no other one in disguise (NAT64, 6to4, IPv4 as IPv6)."""
    if isinstance(address, ipaddress.IPv6Address) and (address not in _UNICAST or address.sixtofour is not None):
        return False
    return address.is_global and not address.is_multicast


def _links_of(prompt: Input) -> Iterable[str]:
    if isinstance(prompt, PassedCall):
        return prompt.links
    if not isinstance(prompt, ChatPrompt) or not prompt.media:
        return ()
    parts = (part for message in prompt.messages for part in message.parts)
    return (part.link for part in parts if isinstance(part, MediaPart) and part.link)
