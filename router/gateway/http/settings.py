"""The `[cors]` table of either tier."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

_ORIGIN = re.compile(r"https?://(\*\.)?([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


class CorsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which web pages may read answers. Pages of this host always may where only this host reaches the tier.

    Attributes:
        allow_origins: `https://app.example`, `https://*.example.com` (below it, never it itself), or `*` for all, which
            needs API keys. Scheme, host and port as the browser names them.
        allow_credentials: pages may send cookies and client certificates along; API keys in headers need it not.
        max_age_s: how long a browser may remember what it was told.
    """

    allow_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    max_age_s: Annotated[int, msgspec.Meta(ge=0, le=86_400)] = 600

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        for origin in self.allow_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin.lower()):
                raise ValueError(
                    f"allow_origins: `{origin[:80]}` is no origin: write scheme, host and port without a path, as in "
                    "https://app.example or https://*.example.com:8443, or `*`"
                )
        if "*" in self.allow_origins and self.allow_credentials:
            raise ValueError("allow_credentials: browsers send none where `*` is allowed: name the origins instead")
