"""The bookkeeping of batches under whatever order of events, crashes included: each line is answered exactly once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import Connection

from router.jobs import batches
from router.jobs.database import Database
from router.jobs.records import ENDED, Batch, BatchStatus, Line, LineAnswer, LineKind

KINDS = st.sampled_from(list(LineKind))
_LINES = 12


class Bookkeeping(RuleBasedStateMachine):
    """A batch, and a plain model of it."""

    @initialize(lines=st.integers(1, _LINES))
    def begin(self, lines: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.url = f"sqlite:///{Path(self.folder.name) / 'jobs.sqlite'}"
        self.open()
        self.total = lines
        self.answers: dict[int, tuple[LineKind, bytes]] = {}
        self.status = BatchStatus.VALIDATING
        batch = Batch("b", "me", BatchStatus.VALIDATING, "/v1/completions", "f", "24h", 1, 2)
        self.database.run_here(lambda c: batches.add(c, batch))

    def open(self) -> None:
        self.database = Database(self.url, lambda: "here", lambda: None)
        self.database.open()

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
            self.folder.cleanup()

    @rule()
    def validated(self) -> None:
        lines = [Line("b", number, f"id-{number}", 0, 1) for number in range(1, self.total + 1)]
        began = self.database.run_here(lambda c: batches.begin(c, "b", 3, lines))
        assert began is (self.status is BatchStatus.VALIDATING)
        if began:
            self.status = BatchStatus.IN_PROGRESS

    @rule(answered=st.lists(st.tuples(st.integers(1, _LINES), KINDS), max_size=6), text=st.binary(max_size=8))
    def answered(self, answered: list[tuple[int, LineKind]], text: bytes) -> None:
        """Answers come, of lines that were answered before too, or of none."""
        given = [LineAnswer("b", number, kind, text + bytes([number])) for number, kind in answered]
        new = self.database.run_here(lambda c: batches.commit(c, given))
        before = len(self.answers)
        if self.status is BatchStatus.IN_PROGRESS:
            for answer in given:
                if answer.number <= self.total:
                    self.answers.setdefault(answer.number, (answer.kind, answer.text))
        assert new == len(self.answers) - before

    @rule(answered=st.lists(st.integers(1, _LINES), min_size=1, max_size=6))
    def killed_in_a_commit(self, answered: list[int]) -> None:
        """The machine is lost after the answers were written, before the transaction ended."""
        given = [LineAnswer("b", number, LineKind.OUTPUT, b"lost") for number in answered]

        class Killed(Exception):
            pass

        def work(connection: Connection) -> None:
            batches.commit(connection, given)
            raise Killed

        try:
            self.database.run_here(work)
        except Killed:
            self.restarted()

    @rule()
    def restarted(self) -> None:
        self.database.close()
        self.open()

    @rule()
    def cancelled(self) -> None:
        before = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        moved = self.database.run_here(lambda c: batches.move(c, "b", 5, BatchStatus.CANCELLING, *before))
        assert moved is (self.status in before)
        if moved:
            self.status = BatchStatus.CANCELLING

    @rule()
    def finalized(self) -> None:
        step = (BatchStatus.FINALIZING, BatchStatus.IN_PROGRESS)
        if self.database.run_here(lambda c: batches.move(c, "b", 6, *step)):
            assert self.status is BatchStatus.IN_PROGRESS
            self.status = BatchStatus.FINALIZING

    @rule()
    def ended(self) -> None:
        """Its files are written: what they hold is what was answered, once each, in order."""
        if self.status not in {BatchStatus.FINALIZING, BatchStatus.CANCELLING}:
            return
        batch = self.database.run_here(lambda c: batches.get(c, "me", "b"))
        for kind in LineKind:
            held = self.database.run_here(lambda c, kind=kind: batches.answers_after(c, "b", kind, 0, 100))
            assert held == [(n, text) for n, (k, text) in sorted(self.answers.items()) if k is kind]
        left = self.database.run_here(lambda c: batches.unanswered(c, "b", 0, 100))
        ran = batch.total  # 0 where it was cancelled before its lines were known
        assert [line.number for line in left] == [n for n in range(1, ran + 1) if n not in self.answers]
        cancelled = self.status is BatchStatus.CANCELLING
        to = BatchStatus.CANCELLED if cancelled else BatchStatus.COMPLETED
        assert self.database.run_here(lambda c: batches.end(c, batch, 7, to, {}))
        assert not self.database.run_here(lambda c: batches.end(c, batch, 8, to, {}))
        self.status = to

    @invariant()
    def counts_are_those_of_the_answers(self) -> None:
        if not hasattr(self, "database"):
            return
        batch = self.database.run_here(lambda c: batches.get(c, "me", "b"))
        assert batch.status is self.status
        kinds = [kind for kind, _ in self.answers.values()]
        assert batch.completed == kinds.count(LineKind.OUTPUT)
        assert batch.failed == kinds.count(LineKind.ERROR)
        assert batch.answered <= max(batch.total, 0)
        if self.status not in ENDED and self.status is not BatchStatus.VALIDATING:
            left = self.database.run_here(lambda c: batches.unanswered(c, "b", 0, 100))
            assert len(left) + batch.answered == batch.total


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
