"""Any replica of the best rung: what every other policy has to be better than. The same for the same request time."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from router.policy.queueing import FirstComeFirstServed, accepted_s
from router.values.situation import Candidate, Situation


class RandomChoice(FirstComeFirstServed):
    """See the module."""

    def pick(self, candidates: Sequence[Candidate], situation: Situation) -> Candidate:
        drawn = zlib.crc32(struct.pack("<d", accepted_s(situation)))
        return candidates[drawn % len(candidates)]


POLICY = RandomChoice()
