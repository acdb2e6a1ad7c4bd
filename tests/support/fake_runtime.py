"""A runtime that needs no model: its next token depends on every id fed so far, so any mix-up of sequences shows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edge_agent.runtime.protocol import RuntimeFacts, StepInput

VOCAB = 97
EOS = 2


def next_token(ids: Sequence[int]) -> int:
    """The token after `ids`; never EOS."""
    state = 17
    for token in ids:
        state = (state * 31 + token + 1) % 1_000_003
    return 3 + state % (VOCAB - 3)


def answer(prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


@dataclass
class FakeRuntime:
    slots: int = 4
    context_tokens: int = 512
    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    sequences: dict[int, list[int]] = field(default_factory=dict)
    fail_on: set[int] = field(default_factory=set)
    gate: threading.Semaphore | None = None
    stepped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    closed: bool = False
    released: int = 0
    opened: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    callers: dict[int, str] = field(default_factory=dict)
    kept: list[tuple[str, list[int]]] = field(default_factory=list)

    @property
    def facts(self) -> RuntimeFacts:
        return RuntimeFacts("fake", "fake", VOCAB, self.context_tokens, self.slots, 1, ("fake",), scored_tokens=8)

    @property
    def kv_bytes(self) -> int:
        return sum(map(len, self.sequences.values()))

    def open(
        self, token_ids: Sequence[int], caller: str = "", *, exact: bool = False, from_scratch: bool = False
    ) -> tuple[int, int]:
        assert len(self.sequences) < self.slots, "more sequences than slots"
        self.opened += 1
        self.prompts.append(list(token_ids))
        self.callers[self.opened] = caller
        cached = 0 if exact or from_scratch else self._take_kept(list(token_ids), caller)
        self.trim_kept(self.slots - len(self.sequences) - 1)
        self.sequences[self.opened] = list(token_ids[:cached])
        return self.opened, cached

    def _take_kept(self, token_ids: list[int], caller: str) -> int:
        """Take the one that is wholly the beginning of `token_ids`."""
        for item in self.kept:
            owner, ids = item
            if owner == caller and len(ids) < len(token_ids) and token_ids[: len(ids)] == ids:
                self.kept.remove(item)
                return len(ids)
        return 0

    def forward(self, batch: Sequence[StepInput]) -> np.ndarray:
        if self.gate is not None:
            self.gate.acquire()
        self.steps.append([(item.sequence, len(item.token_ids)) for item in batch])
        self.stepped.release()
        if len(self.steps) in self.fail_on:
            raise RuntimeError("the accelerator fell over")
        assert len({len(item.token_ids) for item in batch}) == 1, "ragged batch"
        rows = []
        for item in batch:
            known = self.sequences[item.sequence]
            for place, token in enumerate(item.token_ids, 1):
                known.append(token)
                if item.want_logits and (item.every or place == len(item.token_ids)):
                    row = np.zeros(VOCAB, np.float32)
                    row[next_token(known)] = 9
                    rows.append(row)
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    def close_sequence(self, sequence: int, *, keep: bool = False) -> None:
        ids = self.sequences.pop(sequence)
        if keep:
            self.kept.append((self.callers[sequence], ids))

    def trim_kept(self, most: int) -> None:
        del self.kept[: max(0, len(self.kept) - most)]

    def release_memory(self) -> None:
        self.released += 1

    def close(self) -> None:
        self.closed = True


@dataclass
class Delta:
    text: str
    stop: str | None = None


class FakeText:
    """Each token is the text `<id>`."""

    def push(self, token_ids: list[int]) -> Delta:
        return Delta("".join(f"<{token}>" for token in token_ids))

    def finish(self) -> str:
        return ""


def texts(ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in ids)
