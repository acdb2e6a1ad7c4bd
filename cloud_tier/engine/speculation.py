"""What a sequence has said before as a draft, and whether drafting and checking are worth it.

Answers repeat their prompts and themselves: the tokens that followed the last occurrence of a sequence's newest tokens
are drafted, computed in one step behind the newest, and kept as far as greedy decoding chooses the same (prompt lookup,
Saxena 2023). What is kept is what would have been drawn without: speculation is about time alone. A drafted token that
is refused was computed in vain, which costs little while few sequences decode and much in a large batch, so each step
weighs what the drafts would bring against what they cost, from the steps before.
"""

from __future__ import annotations

from collections.abc import Sequence

_GRAM = 3  # tokens that must agree before what followed them is drafted
_FORGET = 0.02  # weight of the newest step
_DRAFTING = 0.1  # weight of the newest drafting
_FIRST_RATE = 0.5
_RETURN = 0.002  # how fast a rate that forbids drafting is forgotten, a step
_MARGIN = 1.05


class NgramIndex:
    """Where each run of three tokens of one sequence last stood."""

    __slots__ = ("_last", "_seen")

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that followed the last earlier occurrence of the newest three; often none.

        Args:
            tokens: the whole sequence; since the last call it has only grown.
        """
        end = len(tokens)
        for place in range(max(self._seen, _GRAM), end):
            self._last[tuple(tokens[place - _GRAM : place])] = place
        self._seen = max(self._seen, end)
        found = self._last.get(tuple(tokens[end - _GRAM : end])) if end > _GRAM else None
        return [] if found is None else list(tokens[found : min(found + most, end)])


class Speculation:
    """What drafts brought, and how the duration of a step grows with its tokens (a line, fitted as steps come)."""

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self._rate = _FIRST_RATE
        self._weight = 0.0
        self._draft_s = 0.0
        self._tokens = self._duration_s = self._square = self._product = 0.0

    def worth(self, sequences: int, drafted: int) -> bool:
        """Tell whether a step of so many decoding sequences brings more tokens a second with so many drafted ones."""
        base_s, token_s = self._line()
        plain_s = base_s + token_s * sequences
        longer_s = plain_s + (token_s + self._draft_s) * drafted
        worth = (sequences + self._rate * drafted) * plain_s >= _MARGIN * sequences * longer_s
        if not worth:
            self._rate += _RETURN * (_FIRST_RATE - self._rate)
        return worth or self._weight == 0

    def note_step(self, tokens: int, duration_s: float) -> None:
        """Learn from a step that computed so many tokens and no prompt."""
        keep = 1 - _FORGET
        self._weight = keep * self._weight + _FORGET
        self._tokens = keep * self._tokens + _FORGET * tokens
        self._duration_s = keep * self._duration_s + _FORGET * duration_s
        self._square = keep * self._square + _FORGET * tokens * tokens
        self._product = keep * self._product + _FORGET * tokens * duration_s

    def note_drafting(self, drafted: int, duration_s: float) -> None:
        """Learn how long it took to draft so many tokens."""
        took_s = duration_s / drafted
        self._draft_s += _DRAFTING * (took_s - self._draft_s) if self._draft_s else took_s

    def note_drafts(self, drafted: int, accepted: int) -> None:
        """Learn how many of a sequence's drafted tokens were right."""
        self.drafted += drafted
        self.accepted += accepted
        self._rate += _FORGET * drafted * (accepted / drafted - self._rate)

    def _line(self) -> tuple[float, float]:
        """Seconds of a step without tokens, and of each token in it, neither below 0."""
        if self._weight == 0:
            return 0.0, 0.0
        tokens, duration_s = self._tokens / self._weight, self._duration_s / self._weight
        variance = self._square / self._weight - tokens * tokens
        if variance <= 1e-9:
            return duration_s, 0.0
        slope = (self._product / self._weight - tokens * duration_s) / variance
        slope = min(max(slope, 0.0), duration_s / tokens)
        return duration_s - slope * tokens, slope
