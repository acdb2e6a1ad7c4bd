"""From the logits of a step to the next tokens of its sequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from cloud_tier.engine.constrained import Masking
from cloud_tier.engine.logprobs import RowLogprobs, read_prompt
from cloud_tier.engine.sampler import sample
from cloud_tier.engine.scheduler import Scheduled
from cloud_tier.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew. Of sequences whose numbers are none, nothing is said.

    Attributes:
        tokens: by handle: one, and one behind each draft that holds; none where the answer turned out to be whole.
        logprobs: what is to be told of them.
        unmatched: by handle: why nothing can be drawn under a sequence's constraint.
        late: by handle: the logits, float32 (1, vocab), of a sequence whose mask is not ready.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: RowLogprobs | None = None
    unmatched: dict[int, str] = field(default_factory=dict)
    late: dict[int, torch.Tensor] = field(default_factory=dict)


def draw(logits: torch.Tensor | None, entries: list[Scheduled], finite: dict[int, bool], masking: Masking) -> Drawn:
    """Draw the next tokens of each sequence whose numbers are some.

    Args:
        logits: float32 (rows, vocab), those of each entry behind those of the one before; overwritten.
        entries: those that have rows.
        finite: by handle: whether its numbers are some.
    """
    drawn = Drawn()
    if logits is None:
        return drawn
    end, newest = 0, {}
    for entry in entries:
        first, end = end, end + entry.rows
        handle = entry.sequence.handle
        if not finite[handle]:
            continue
        if entry.scored:
            _read_prompt(logits[first:end], entry.sequence)
        row = end - 1 - len(entry.draft)
        if entry.draws and _may_draw(entry.sequence, logits[row : row + 1], drawn):
            newest[handle] = row
    entries = [entry for entry in entries if entry.sequence.handle in newest]
    if not entries:
        return drawn
    told = _row_logprobs(logits, entries, newest)  # before `sample` overwrites the logits
    drafts = [entry for entry in entries if entry.draft]
    likeliest: list[int] = logits.argmax(dim=-1).tolist() if drafts else []
    rows = list(newest.values())
    drawn.tokens.update(_draw_one(logits if len(rows) == end else logits[torch.tensor(rows)], entries, masking))
    for entry in drafts:
        handle = entry.sequence.handle
        behind = slice(newest[handle] + 1, newest[handle] + 1 + len(entry.draft))
        _follow(entry, drawn.tokens[handle], likeliest[behind], logits[behind], masking)
    return replace(drawn, logprobs=told)


def _may_draw(sequence: Sequence, logits: torch.Tensor, drawn: Drawn) -> bool:
    """Whether a token can be drawn now; says why not in `drawn`."""
    guide = sequence.guide
    if guide is None:
        return True
    if not guide.ready:
        drawn.late[sequence.handle] = logits.clone()
    elif guide.failure:
        drawn.unmatched[sequence.handle] = guide.failure
    elif guide.complete:
        drawn.tokens[sequence.handle] = []
    else:
        return True
    return False


def _draw_one(logits: torch.Tensor, entries: list[Scheduled], masking: Masking) -> dict[int, list[int]]:
    """Draw one token of each, and lead its guide over it."""
    guides = [(row, entry.sequence.guide) for row, entry in enumerate(entries)]
    masking.apply(logits, [(row, guide) for row, guide in guides if guide is not None])
    tokens = sample(logits, [entry.sequence.sampler for entry in entries])
    for row, guide in guides:
        if guide is not None:
            guide.advance(tokens[row])
    return {entry.sequence.handle: [token] for entry, token in zip(entries, tokens, strict=True)}


def _follow(entry: Scheduled, drawn: list[int], likeliest: list[int], logits: torch.Tensor, masking: Masking) -> None:
    """Draw on behind each draft that holds.

    Args:
        drawn: the first token; takes the others.
        likeliest, logits: behind each draft: token ids, and float32 (drafts, vocab), overwritten.
    """
    guide = entry.sequence.guide
    for place, token in enumerate(entry.draft):
        if drawn[-1] != token:
            return
        if guide is None:
            drawn.append(likeliest[place])
            continue
        if guide.slow or guide.complete:
            return
        guide.look()
        if guide.failure:  # told with its next token
            return
        row = logits[place : place + 1]
        masking.apply(row, [(0, guide)])
        drawn.append(int(row.argmax()))
        guide.advance(drawn[-1])


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
