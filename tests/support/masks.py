"""Masks of answers under constraints: how many a test needed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from models.text import guide
from models.text.grammar import Matcher


def count_masks(monkeypatch: pytest.MonkeyPatch) -> list[Matcher]:
    """Return what is to hold the matcher of every mask that is found from now on. None takes long, on any machine."""
    masks, mask = [], Matcher.mask

    def counted(matcher: Matcher, vocab_size: int) -> npt.NDArray[np.uint8]:
        masks.append(matcher)
        return mask(matcher, vocab_size)

    monkeypatch.setattr(Matcher, "mask", counted)
    for bound in ("_DEAR_S", "_SLOW_S", "_MOST_S"):
        monkeypatch.setattr(guide, bound, 60.0)
    return masks
