"""How many threads compute a step, found out while they do.

Threads of one step wait for each other at every product. On idle cores, two are nearly twice as fast as one. Where a
neighbour takes one of the cores, all wait for the thread that lost it: two threads were then measured to be eight times
as slow as one. Nobody tells a process of its neighbours, so from time to time a few steps are computed by more or by
fewer threads in turn with the usual number, and the faster one is kept. Steps with much of a prompt are judged apart
from those that decode. A number that has lost is tried again after ever more steps, and at once when steps have become
slow.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

_PROMPT_STEP_TOKENS = 64
_PAIRS = 3  # steps of each number in a trial
_ALIKE = 1.25  # by which factor the tokens of steps that are compared may differ
_GAIN = 0.93  # a number takes over that needs less than this share of the time
_SOON_STEPS, _FIRST_PAUSE_STEPS, _LONGEST_PAUSE_STEPS = 4, 16, 1024
_SLOW, _SLOW_STEPS = 1.5, 3  # so much slower than usual, so often in a row
_SMOOTHING = 0.1


class Threads:
    """The number of threads for each step.

    Args:
        numbers: those to choose among, ascending; the last but one comes first, so that a core is left for others
            until it proves idle. A single one is always taken.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._decoding = _Choice(numbers)
        self._prompts = _Choice(numbers)

    def choose(self, tokens: int) -> int:
        """Return the number of threads for a step of so many tokens; `note` follows."""
        return self._of(tokens).choose(tokens)

    def note(self, tokens: int, took_s: float) -> None:
        """Learn how long the chosen step took."""
        self._of(tokens).note(tokens, took_s)
        self._decoding.follow(self._prompts)
        self._prompts.follow(self._decoding)

    def _of(self, tokens: int) -> _Choice:
        return self._prompts if tokens >= _PROMPT_STEP_TOKENS else self._decoding


@dataclass(slots=True)
class _Trial:
    """Seconds a token, by the number that is used and by the `other`, of steps in turn."""

    other: int
    tokens: int
    own_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)

    @property
    def others_turn(self) -> bool:
        return len(self.other_s) < len(self.own_s)

    @property
    def complete(self) -> bool:
        return len(self.other_s) == _PAIRS

    @property
    def won(self) -> bool:
        return statistics.median(self.other_s) < _GAIN * statistics.median(self.own_s)


class _Choice:
    """One kind of step: places in `numbers`."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._at = max(0, len(numbers) - 2)
        self._up = True
        self._pause, self._left = _FIRST_PAUSE_STEPS, _SOON_STEPS
        self._trial: _Trial | None = None
        self._usual = (0, 0.0)  # tokens, seconds a token
        self._slow = 0
        self._tried = False

    def choose(self, tokens: int) -> int:
        if self._trial is not None and not _alike(tokens, self._trial.tokens):
            self._trial, self._left = None, _SOON_STEPS  # there is nothing to compare
        elif self._trial is None and self._left <= 0 and len(self._numbers) > 1:
            self._trial = _Trial(self._neighbour(), tokens)
        trial = self._trial
        return self._numbers[trial.other if trial is not None and trial.others_turn else self._at]

    def note(self, tokens: int, took_s: float) -> None:
        trial, pace_s = self._trial, took_s / tokens
        if trial is None:
            self._left -= 1
            self._watch(tokens, pace_s)
        else:
            (trial.other_s if trial.others_turn else trial.own_s).append(pace_s)
            if trial.complete:
                self._conclude(trial)

    def follow(self, other: _Choice) -> None:
        """Take over what was found out for other steps, until a trial has said anything of these."""
        if not self._tried and self._trial is None:
            self._at = other._at

    def _neighbour(self) -> int:
        """The next number up or down, wherever the last trial that was lost did not go."""
        wanted = self._at + (1 if self._up else -1)
        if not 0 <= wanted < len(self._numbers):
            self._up = not self._up
            wanted = self._at + (1 if self._up else -1)
        return wanted

    def _conclude(self, trial: _Trial) -> None:
        self._trial, self._tried = None, True
        if trial.won:
            self._at, self._pause = trial.other, _FIRST_PAUSE_STEPS
            self._usual = (0, 0.0)
        else:
            self._up = not self._up
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_STEPS)
        self._left, self._slow = self._pause, 0

    def _watch(self, tokens: int, pace_s: float) -> None:
        """Try again early when steps like those before have become much slower."""
        usual_tokens, usual_s = self._usual
        if not _alike(tokens, usual_tokens):
            self._usual, self._slow = (tokens, pace_s), 0
        elif pace_s > _SLOW * usual_s:
            self._slow += 1
            if self._slow == _SLOW_STEPS:
                self._pause = _FIRST_PAUSE_STEPS
                self._left, self._usual, self._up = 0, (0, 0.0), False
        else:
            self._slow = 0
            self._usual = (usual_tokens, usual_s + _SMOOTHING * (pace_s - usual_s))


def _alike(tokens: int, others: int) -> bool:
    return max(tokens, others) <= _ALIKE * min(tokens, others)
