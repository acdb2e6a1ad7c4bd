"""Statistics of the inputs of every matrix over real chats, position 0 left out.

They are computed in float64 and told in float32, so that every processor calibrates, and then rounds, alike: sums of
float32 differ from one to the next by what decides some roundings, and with them what a small model says.

Position 0 carries activations a thousand times larger than any other; artifacts ship its keys and values in float32
instead of running it, so it must not set the scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from models.graph.decoder import Decoder, packed
from models.graph.fused import Array, FusedModel
from models.graph.int8 import LEVELS

_SAMPLED_ROWS = 512
_PASS_TOKENS = 768
_CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)


@dataclass
class Site:
    """One matrix's inputs: the largest magnitude per channel over all tokens, and rows of every `stride`-th token."""

    largest: torch.Tensor
    rows: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Observed:
    """Statistics by (layer, matrix name); the head is (num_layers, "head")."""

    sites: dict[tuple[int, str], Site]
    tokens: int

    def largest(self) -> dict[tuple[int, str], Array]:
        """Largest magnitude per input channel, (in,) each."""
        return {key: site.largest.numpy() for key, site in self.sites.items()}

    def input_scale(self, layer: int, matrix: str) -> float:
        """The per-tensor scale whose clipping and rounding lose least (squared error) on the sampled rows."""
        site = self.sites[layer, matrix]
        largest = float(site.largest.max())
        if largest == 0.0:
            return 1.0
        rows = torch.cat(site.rows).to(torch.float64)
        best_scale, lowest = largest / LEVELS, float("inf")
        for clip in _CLIPS:
            scale = largest * clip / LEVELS
            rounded = (rows / scale).round().clamp(-LEVELS, LEVELS) * scale
            error = float((rows - rounded).square().mean())
            if error < lowest:
                best_scale, lowest = scale, error
        return best_scale


def observe(model: FusedModel, sequences: Sequence[Sequence[int]]) -> Observed:
    """Run `sequences` through the decoder and watch every matrix."""
    decoder = Decoder(model, torch.float64)
    sites: dict[tuple[int, str], Site] = {}
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    stride = max(1, tokens // _SAMPLED_ROWS)
    for batch in _batches(sequences):
        inputs = packed(model, batch)
        later = inputs.position_ids[0] > 0

        def watch(layer: int, name: str, x: torch.Tensor, later: torch.Tensor = later) -> None:
            rows = (x[0] if name == "head" else x[0, later]).to(torch.float32)
            largest = rows.abs().amax(dim=0)
            site = sites.get((layer, name))
            if site is None:
                site = sites[layer, name] = Site(largest)
            else:
                torch.maximum(site.largest, largest, out=site.largest)
            if name != "down_raw":
                site.rows.append(rows[stride // 2 :: stride].clone())

        decoder(inputs, watch)
    return Observed(sites, tokens)


def _batches(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Group neighbours into passes of at most `_PASS_TOKENS`, a longer sequence alone; one token has nothing to see."""
    batch: list[Sequence[int]] = []
    size = 0
    for sequence in sequences:
        if batch and size + len(sequence) > _PASS_TOKENS:
            yield batch
            batch, size = [], 0
        if len(sequence) > 1:
            batch.append(sequence)
            size += len(sequence)
    if batch:
        yield batch
