"""What this tier runs on a replica elsewhere, held against the last load report of it.

A report of thousands of requests costs what one of a single request does: what a request had when it was taken is noted
when that changes, which is when its next token comes or its end.
"""

from __future__ import annotations

import msgspec


class Running(msgspec.Struct, eq=False):
    """A request of this tier.

    Attributes:
        left_tokens: that it may still generate; came_tokens: generated so far.
        noted: the report that the next two are of.
        at_report_tokens: tokens it still had to generate when that was taken; None if it does not know the request.
        kv_tokens: of the KV cache that it held then: none before its first token.
    """

    prompt_tokens: int
    left_tokens: int
    began_s: float
    noted: int
    at_report_tokens: int | None = None
    came_tokens: int = 0
    kv_tokens: int = 0

    @property
    def held_tokens(self) -> int:
        """Count the tokens that it will have in the KV cache as soon as its prompt is computed."""
        return self.prompt_tokens + self.came_tokens


class Unseen(msgspec.Struct):
    """What the last report does not know of yet."""

    requests: int = 0
    prompt_tokens: int = 0
    left_tokens: int = 0

    def add(self, running: Running) -> None:
        self.requests += 1
        self.prompt_tokens += running.prompt_tokens
        self.left_tokens += running.left_tokens

    def remove(self, running: Running) -> None:
        self.requests -= 1
        self.prompt_tokens -= running.prompt_tokens
        self.left_tokens -= running.left_tokens


class RunningWork:
    """All of them, in the order in which they began.

    Attributes:
        ended, ended_tokens, ended_kv_tokens: what the last report knows of and is over; what it had left, and held.
        kv_taken_tokens: what those that run hold more of the KV cache than the last report knows of.
    """

    def __init__(self) -> None:
        self._all: dict[Running, None] = {}
        self._report = 0
        self._at_s = 0.0
        self._counts_ours = False
        self._unbegun_tokens = 0  # prompts of those without a token
        self._unseen: Unseen | None = None  # summed up once for each report that somebody asks about, and then kept
        self.ended = self.ended_tokens = self.ended_kv_tokens = 0
        self.kv_taken_tokens = 0

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, prompt_tokens: int, answer_tokens: int, now_s: float) -> Running:
        """Count a request; it has its `end` in any case."""
        running = Running(prompt_tokens, answer_tokens, now_s, self._report)
        self._all[running] = None
        self._unbegun_tokens += prompt_tokens
        self.kv_taken_tokens += prompt_tokens
        if self._unseen is not None:
            self._unseen.add(running)
        return running

    def came(self, running: Running, tokens: int) -> None:
        """So many tokens more came."""
        if running.noted != self._report:
            self._note(running)
        if tokens and not running.came_tokens:
            self._unbegun_tokens -= running.prompt_tokens
        left = running.left_tokens
        made = tokens if tokens < left else left  # noqa: FURB136 - done for every token
        running.left_tokens -= made
        if self._unseen is not None and running.at_report_tokens is None:
            self._unseen.left_tokens -= made
        running.came_tokens += tokens
        self.kv_taken_tokens += tokens

    def end(self, running: Running) -> None:
        """It is over, whichever way."""
        if running.noted != self._report:
            self._note(running)
        del self._all[running]
        self.kv_taken_tokens -= running.held_tokens - running.kv_tokens
        if not running.came_tokens:
            self._unbegun_tokens -= running.prompt_tokens
        if running.at_report_tokens is not None:
            self.ended += 1
            self.ended_tokens += running.at_report_tokens
            self.ended_kv_tokens += running.kv_tokens
        elif self._unseen is not None:
            self._unseen.remove(running)

    def reported(self, at_s: float, *, counts_ours: bool) -> None:
        """A report came, which was asked for at `at_s`.

        Args:
            counts_ours: it knows of the requests of this tier.
        """
        self._report += 1
        self._at_s, self._counts_ours = at_s, counts_ours
        self.ended = self.ended_tokens = self.ended_kv_tokens = 0
        self.kv_taken_tokens = self._unbegun_tokens
        self._unseen = None

    def unseen(self) -> Unseen:
        """Return what the last report does not know of: those that began last. It is to be read at once."""
        found = self._unseen
        if found is None:
            found = self._unseen = Unseen()
            for running in reversed(self._all):
                if self._is_known(running):
                    break
                found.add(running)
        return found

    def began_by(self, at_s: float) -> int:
        """Count those that began by then."""
        return sum(running.began_s <= at_s for running in self._all)

    def _is_known(self, running: Running) -> bool:
        if running.noted == self._report:
            return running.at_report_tokens is not None
        return self._counts_ours and running.began_s <= self._at_s

    def _note(self, running: Running) -> None:
        """Note what a request had at the last report, before that changes."""
        running.at_report_tokens = running.left_tokens if self._is_known(running) else None
        running.kv_tokens = running.held_tokens if running.came_tokens else 0
        running.noted = self._report
