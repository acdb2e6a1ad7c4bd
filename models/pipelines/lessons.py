"""What is known of the stages of one pipeline, however often it is loaded."""

from __future__ import annotations

from collections.abc import Callable

from models.pipelines.known_good import KnownGood
from models.pipelines.set_apart import SetApart


class Lessons:
    """Kept by who loads the pipeline anew, for each stage by its name."""

    def __init__(self) -> None:
        self._known_good: dict[str, KnownGood] = {}
        self._set_apart: dict[str, SetApart] = {}

    def known_good(self, stage: str) -> KnownGood:
        """Return what tells bad inputs from a broken stage."""
        return self._known_good.setdefault(stage, KnownGood())

    def set_apart(self, stage: str, now_s: Callable[[], float]) -> SetApart:
        """Return what has ended its process lately, on the clock of its pipelines."""
        return self._set_apart.setdefault(stage, SetApart(stage, now_s))
