"""From the logits of a step to the next tokens of its sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cloud_tier.engine.constrained import mask_rows
from cloud_tier.engine.logprobs import RowLogprobs, read_prompt
from cloud_tier.engine.sampler import sample
from cloud_tier.engine.scheduler import Scheduled
from cloud_tier.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew.

    Attributes:
        tokens: by handle: one, and one behind each draft that holds.
        logprobs: what is to be told of them.
        unmatched: by handle: why nothing can be drawn under a sequence's constraint.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: RowLogprobs | None = None
    unmatched: dict[int, str] = field(default_factory=dict)


def draw(logits: torch.Tensor | None, entries: list[Scheduled], finite: dict[int, bool]) -> Drawn:
    """Draw the next tokens of each sequence whose numbers are some.

    Args:
        logits: float32 (rows, vocab), those of each entry behind those of the one before; overwritten.
        entries: those that have rows.
        finite: by handle: whether its numbers are some.
    """
    if logits is None:
        return Drawn()
    end, newest = 0, {}
    for entry in entries:
        first, end = end, end + entry.rows
        if not finite[entry.sequence.handle]:
            continue
        if entry.scored:
            _read_prompt(logits[first:end], entry.sequence)
        if entry.draws:
            newest[entry.sequence.handle] = end - 1 - len(entry.draft)
    entries = [entry for entry in entries if entry.sequence.handle in newest]
    if not entries:
        return Drawn()
    told = _row_logprobs(logits, entries, newest)  # before `sample` overwrites the logits
    drafts = [entry for entry in entries if entry.draft]
    likeliest: list[int] = logits.argmax(dim=-1).tolist() if drafts else []
    rows = list(newest.values())
    drawn, unmatched = _draw_one(logits if len(rows) == end else logits[torch.tensor(rows)], entries)
    for entry in drafts:
        handle = entry.sequence.handle
        if handle not in unmatched:
            behind = slice(newest[handle] + 1, newest[handle] + 1 + len(entry.draft))
            _follow(entry, drawn[handle], likeliest[behind], logits[behind])
    return Drawn(drawn, told, unmatched)


def _draw_one(logits: torch.Tensor, entries: list[Scheduled]) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Draw one token of each, and lead its matcher over it."""
    matchers = [(row, e.sequence.matcher) for row, e in enumerate(entries) if e.sequence.matcher is not None]
    unmatched = {entries[row].sequence.handle: why for row, why in mask_rows(logits, matchers).items()}
    tokens = sample(logits, [entry.sequence.sampler for entry in entries])
    for row, matcher in matchers:
        if not matcher.failure:
            matcher.advance(tokens[row])
    return {entry.sequence.handle: [token] for entry, token in zip(entries, tokens, strict=True)}, unmatched


def _follow(entry: Scheduled, drawn: list[int], likeliest: list[int], logits: torch.Tensor) -> None:
    """Draw on behind each draft that holds.

    Args:
        drawn: the first token; takes the others.
        likeliest, logits: behind each draft: token ids, and float32 (drafts, vocab), overwritten.
    """
    matcher = entry.sequence.matcher
    for place, token in enumerate(entry.draft):
        if drawn[-1] != token:
            return
        if matcher is None:
            drawn.append(likeliest[place])
            continue
        row = logits[place : place + 1]
        if matcher.complete or mask_rows(row, [(0, matcher)]):  # what is wrong is told with its next token
            return
        drawn.append(int(row.argmax()))
        matcher.advance(drawn[-1])


def _row_logprobs(logits: torch.Tensor, entries: list[Scheduled], rows: dict[int, int]) -> RowLogprobs | None:
    wanted = {
        entry.sequence.handle: (rows[entry.sequence.handle], top)
        for entry in entries
        if (top := entry.sequence.request.sampling.logprobs) is not None
    }
    return RowLogprobs(logits, wanted) if wanted else None


def _read_prompt(logits: torch.Tensor, sequence: Sequence) -> None:
    request = sequence.request
    top = request.sampling.logprobs or 0
    read_prompt(logits, sequence.num_computed, request.prompt_ids, sequence.prompt_told, top)
