"""Overload with hysteresis: decides when the tier steps down the ladder and when it steps up."""

from __future__ import annotations

from router.values.settings import RouterSettings


class Ladder:
    """Holds whether the tier is overloaded; between `overload_leave` and `overload_enter` that does not change."""

    def __init__(self) -> None:
        self.overloaded = False

    def update(self, waiting: int, settings: RouterSettings) -> bool:
        """Compare the number of waiting requests with the limits; returns whether overload began or ended."""
        share = waiting / settings.max_queue
        before = self.overloaded
        if share >= settings.overload_enter and waiting > 0:
            self.overloaded = True
        elif share <= settings.overload_leave:
            self.overloaded = False
        return self.overloaded is not before

    def answer_cap(self, max_tokens: int | None, settings: RouterSettings) -> int | None:
        """The answer cap in force, None if the caller's own stands."""
        cap = max(settings.overload_answer_tokens, settings.min_answer_tokens)
        if not self.overloaded or (max_tokens is not None and max_tokens <= cap):
            return None
        return cap
