"""Choose the layers that a smaller rung does without, by measured perplexity on the calibration chats.

Greedy: of the layers still kept, drop the one whose absence costs least, measure, and go on. From the second step on
only the layers that were cheapest before are tried again: what was dear to drop does not become cheap. The catalogue
records the choice (`layers` of a variant); the tool is run when a family enters the catalogue, not on a user's machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from models.graph.artifact import Note, silent
from models.graph.decoder import Decoder, Inputs, packed
from models.graph.fused import FusedModel
from router.base.errors import ArtifactError


@dataclass(frozen=True)
class Pruning:
    """One step of the search.

    Attributes:
        layers: kept layers, ascending.
        dropped: what this step dropped, None for the whole model.
        perplexity: on the calibration sequences.
    """

    layers: tuple[int, ...]
    dropped: int | None
    perplexity: float


class _Search:
    """Keeps the residual stream in front of every kept layer, so that a trial runs only the layers behind it."""

    def __init__(self, model: FusedModel, sequences: Sequence[Sequence[int]], stride: int) -> None:
        self._decoder = Decoder(model)
        self._inputs: Inputs = packed(model, sequences)
        self._frame = self._decoder.frame(self._inputs)
        position, ids = self._inputs.position_ids[0], self._inputs.input_ids[0]
        follows = torch.nonzero(position[1:] > 1).flatten()  # the next token belongs to the same sequence
        self._at = follows[::stride][None]
        self._targets = ids[self._at[0] + 1]
        self.kept = list(range(len(model.layers)))
        self._states = [self._decoder.embed(self._inputs)]
        self._advance(0)

    def _advance(self, begin: int) -> None:
        """Recompute the states behind the kept layer at `begin`."""
        del self._states[begin + 1 :]
        for layer in self.kept[begin:]:
            self._states.append(self._run(layer, self._states[-1]))

    def _run(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._decoder.layer(layer, x, self._frame, self._inputs)

    def perplexity(self) -> float:
        return self._perplexity(self._states[-1])

    def _perplexity(self, x: torch.Tensor) -> float:
        logits = self._decoder.logits(x, self._at)[0]
        return float(F.cross_entropy(logits, self._targets).exp())

    def without(self, at: int) -> float:
        """Perplexity if the kept layer at index `at` were dropped as well."""
        x = self._states[at]
        for layer in self.kept[at + 1 :]:
            x = self._run(layer, x)
        return self._perplexity(x)

    def drop(self, at: int) -> None:
        self.kept.pop(at)
        self._advance(at)


def prune(
    model: FusedModel,
    sequences: Sequence[Sequence[int]],
    keep: int,
    *,
    stride: int = 2,
    tries: int = 8,
    note: Note = silent,
) -> list[Pruning]:
    """Drop layers one by one until `keep` are left; the last entry is the choice.

    Args:
        sequences: token ids to measure on; a few thousand tokens make a stable choice.
        stride: of the positions whose next token is scored.
        tries: layers tried in every step but the first, which tries all.

    Raises:
        ArtifactError: `keep` is out of range, or there is nothing to measure on.
    """
    if not 1 <= keep <= len(model.layers):
        raise ArtifactError(f"cannot keep {keep} of {len(model.layers)} layers: give 1 to {len(model.layers)}")
    if not any(len(sequence) > 2 for sequence in sequences):
        raise ArtifactError("pruning needs at least one sequence of three tokens to measure on")
    search = _Search(model, sequences, stride)
    steps = [Pruning(tuple(search.kept), None, search.perplexity())]
    note(f"{len(search.kept)} layers: perplexity {steps[0].perplexity:.3f}")
    costs = dict.fromkeys(search.kept, 0.0)
    tried = len(costs)
    while len(search.kept) > keep:
        cheapest = sorted(search.kept, key=lambda layer: costs[layer])[:tried]
        for layer in cheapest:
            costs[layer] = search.without(search.kept.index(layer))
        dropped = min(cheapest, key=lambda layer: costs[layer])
        search.drop(search.kept.index(dropped))
        steps.append(Pruning(tuple(search.kept), dropped, costs[dropped]))
        note(f"{len(search.kept)} layers: without layer {dropped}, perplexity {costs[dropped]:.3f}")
        tried = tries
    return steps
