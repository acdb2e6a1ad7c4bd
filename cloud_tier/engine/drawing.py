"""From the logits of a step to the next tokens of its sequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from cloud_tier.engine.constrained import Guided, Masking
from cloud_tier.engine.logprobs import RowLogprobs, read_prompt
from cloud_tier.engine.sampler import PROPOSED, SamplerState, propose, sample, shape
from cloud_tier.engine.scheduler import Scheduled
from cloud_tier.engine.sequence import Sequence
from models.text.guide import Guide

_FORBIDDEN = (
    "no token may come next in this answer: its constraint allows only such as `allowed_token_ids`, `logit_bias` or "
    "`min_tokens` forbid"
)


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


def draw(
    logits: torch.Tensor | None, entries: list[Scheduled], finite: dict[int, bool], guided: Guided, most_s: float
) -> Drawn:
    """Draw the next tokens of each sequence whose numbers are some.

    Args:
        logits: float32 (rows, vocab), those of each entry behind those of the one before; overwritten.
        entries: those that have rows.
        finite: by handle: whether its numbers are some.
        most_s: how long masks of those whose own choices are refused are waited for.
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
    _draw_one(logits if len(rows) == end else logits[torch.tensor(rows)], entries, drawn, guided, most_s)
    for entry in drafts:
        handle = entry.sequence.handle
        if handle in drawn.tokens:
            behind = slice(newest[handle] + 1, newest[handle] + 1 + len(entry.draft))
            _follow(entry, drawn.tokens[handle], likeliest[behind], logits[behind], guided)
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


def _draw_one(logits: torch.Tensor, entries: list[Scheduled], drawn: Drawn, guided: Guided, most_s: float) -> None:
    """Draw one token of each, and lead the guides of those under a constraint over theirs."""
    free = [row for row, entry in enumerate(entries) if entry.sequence.guide is None]
    led = [entry.sequence for entry in entries if entry.sequence.guide is not None]
    chosen: dict[int, int] = {}
    if led:
        rows = [row for row, entry in enumerate(entries) if entry.sequence.guide is not None]
        chosen = _choose(logits[rows] if free else logits, led, drawn, guided, most_s)
    if free:
        tokens = sample(logits[free] if led else logits, [entries[row].sequence.sampler for row in free])
        drawn.tokens.update({entries[row].sequence.handle: [token] for row, token in zip(free, tokens, strict=True)})
    for sequence in led:  # only now: a step that raises has changed nothing
        if sequence.guide is not None and (token := chosen.get(sequence.handle)) is not None:
            sequence.sampler.note(token)
            sequence.guide.advance(token)
            drawn.tokens[sequence.handle] = [token]


def _choose(
    logits: torch.Tensor, sequences: list[Sequence], drawn: Drawn, guided: Guided, most_s: float
) -> dict[int, int]:
    """Return by handle the next token of sequences under constraints; of the others say why not in `drawn`.

    What is chosen does not depend on when a mask is found: tokens are proposed first even where there is one.
    """
    guides = [sequence.guide for sequence in sequences if sequence.guide is not None]
    states = [sequence.sampler for sequence in sequences]
    plain = logits.clone() if any(state.shapes for state in states) else logits
    shape(logits, states)
    chosen = _proposed(logits, states, guides)
    refused = [row for row in range(len(guides)) if row not in chosen]
    guided.find([guides[row] for row in refused if guides[row].mask is None], most_s)
    late = [row for row in refused if not guides[row].ready]  # looked at once: any may become ready meanwhile
    masks = {row: mask for row in refused if row not in late and (mask := guides[row].mask) is not None}
    chosen |= _among_allowed(logits, states, masks, guided.masking)
    drawn.late.update({sequences[row].handle: plain[row : row + 1].clone() for row in late})
    for row in refused:
        if row not in late and row not in chosen:
            drawn.unmatched[sequences[row].handle] = guides[row].failure or _FORBIDDEN
    return {sequences[row].handle: token for row, token in chosen.items()}


def _proposed(logits: torch.Tensor, states: list[SamplerState], guides: list[Guide]) -> dict[int, int]:
    """Return by row the first token that it proposes and its constraint allows."""
    rows = [row for row, state in enumerate(states) if state.proposes or guides[row].undecided]
    if not rows:
        return {}
    part = logits if len(rows) == len(states) else logits[rows]
    proposed = zip(rows, propose(part, [states[row] for row in rows], range(PROPOSED)), strict=True)
    firsts = ((row, next((token for token in tokens if guides[row].allows(token)), None)) for row, tokens in proposed)
    return {row: token for row, token in firsts if token is not None}


def _among_allowed(
    logits: torch.Tensor, states: list[SamplerState], masks: dict[int, npt.NDArray[np.uint8]], masking: Masking
) -> dict[int, int]:
    """Return by row a token that its mask allows; of rows whose rules forbid all of them, none."""
    if not masks:
        return {}
    part = logits[list(masks)]
    masking.apply(part, dict(enumerate(masks.values())))
    left = part.amax(dim=-1).isfinite().tolist()
    tokens = propose(part, [states[row] for row in masks], range(PROPOSED, PROPOSED + 1))
    return {row: found[0] for row, found, some in zip(masks, tokens, left, strict=True) if some}


def _follow(entry: Scheduled, drawn: list[int], likeliest: list[int], logits: torch.Tensor, guided: Guided) -> None:
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
        following = _led_on(guide, likeliest[place], logits[place : place + 1], guided.masking)
        if following is None:  # why is told with its next token
            return
        drawn.append(following)
        guide.advance(following)


def _led_on(guide: Guide, likeliest: int, logits: torch.Tensor, masking: Masking) -> int | None:
    """Return the likeliest token that is allowed, None if that cannot be said.

    Args:
        logits: float32 (1, vocab); overwritten.
    """
    if guide.allows(likeliest):
        return likeliest
    guide.look()
    if guide.mask is None:
        return None
    masking.apply(logits, {0: guide.mask})
    return int(logits.argmax())


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
