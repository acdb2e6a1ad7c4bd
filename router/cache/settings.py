"""The `[cache]` table of either tier."""

from __future__ import annotations

from typing import Annotated

import msgspec


class CacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[cache]`: answers that are given again to who asks for the very same. It is read at start.

    Attributes:
        max_mbytes: memory for answers (MB of 1,000,000 bytes), of all tenants together; 0: none are kept.
        max_age_s: an answer is given again for so long.
    """

    max_mbytes: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    max_age_s: Annotated[float, msgspec.Meta(gt=0, le=31_536_000)] = 3_600.0
