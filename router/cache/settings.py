"""The `[cache]` table of either tier."""

from __future__ import annotations

from typing import Annotated

import msgspec


class CacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[cache]`: answers that are given again to who asks for the very same. It is read at start.

    Attributes:
        max_mbytes: memory for answers (MB of 1,000,000 bytes), of all tenants together; 0: none are kept.
        max_age_s: an answer is given again for so long.
        similar_above: an answer is given again also to a last message whose embedding has at least this cosine with
            that of the one that it answered, while all else is the same; 0: to the very same alone.
        embedding_model: what embeds messages for that: a model of this tier, or of one behind.
    """

    max_mbytes: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    max_age_s: Annotated[float, msgspec.Meta(gt=0, le=31_536_000)] = 3_600.0
    similar_above: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    embedding_model: Annotated[str, msgspec.Meta(max_length=256)] = ""

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        if (self.similar_above > 0) != bool(self.embedding_model):
            raise ValueError("similar_above and embedding_model go together: set both, or neither")
