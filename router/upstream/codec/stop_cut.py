"""Stop strings, kept on this side of a server that does not know them, or emits them."""

from __future__ import annotations

from collections.abc import Sequence


class StopCut:
    """Lets a text through up to the first stop string.

    Args:
        stops: strings of at least one character; none lets everything through.

    Attributes:
        stop: the stop string that has come; nothing is let through any more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None

    @property
    def found(self) -> bool:
        """Whether a stop string has come."""
        return self.stop is not None

    def feed(self, text: str) -> str:
        """Return what may be emitted: all but an ending that a stop string could begin with."""
        if self.found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stop = min(found)
            self._held = ""
            return text[:at]  # of the one that is complete first, however the text came in pieces
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """Return what was held back: the text has ended, and no stop string came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest ending of `text` that `stop` begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
