"""From a float32 model and one rotation to an INT8 graph: all steps that change numbers.

The recipe, in order; every step before the last is exact in float32:
    1. fold the RMSNorm gains, rotate the residual stream and the values of each head   (models.graph.rotate)
    2. watch the inputs of all matrices over a few chats, smooth outlier channels       (models.int8.calibrate, .smooth)
    3. put an online Hadamard before each `down`                                         (models.graph.rotate)
    4. watch again; one scale per input tensor, position 0 left out                      (models.int8.calibrate)
    5. compute the float32 keys, values and logits of the first token                    (models.int8.first_token)
    6. round the weights per output channel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.graph.artifact import Note, Prefix, silent
from models.graph.fused import FusedModel
from models.graph.graph import QuantMatrix, QuantPlan
from models.graph.int8 import quantize_columns
from models.graph.rotate import power_of_two_in, rotate, turn_down
from models.int8.calibrate import Observed, observe
from models.int8.first_token import first_token
from models.int8.smooth import smooth
from router.base.errors import ArtifactError

DOWN_BLOCK = 128
_SMOOTHING_SHARE, _SCALE_SHARE = 6, 2  # every 6th chat sets the smoothing, every 2nd the scales


@dataclass(frozen=True)
class Quantized:
    """A model ready to be rounded: its float32 form after all exact steps, and the plan."""

    model: FusedModel
    plan: QuantPlan
    prefix: Prefix | None


def prepare(model: FusedModel, sequences: Sequence[Sequence[int]], note: Note = silent, *, seed: int) -> Quantized:
    """Transform and calibrate a model on token sequences, at least one of two tokens or more.

    Args:
        seed: of the rotation. Any rotation is exact in float32; what rounding makes of it differs.

    Raises:
        ArtifactError: there is nothing to calibrate on.
    """
    usable = [sequence for sequence in sequences if len(sequence) > 1]
    if not usable:
        raise ArtifactError("INT8 scales need at least one calibration sequence of two tokens")
    note(f"rotating the residual stream, seed {seed}")
    model = rotate(model, seed)
    note("watching activations for smoothing")
    model = smooth(model, observe(model, usable[::_SMOOTHING_SHARE]).largest())
    block = power_of_two_in(model.config.intermediate_size, DOWN_BLOCK)
    model = replace(model, layers=tuple(turn_down(layer, block) for layer in model.layers))
    note("watching activations for scales")
    observed = observe(model, usable[::_SCALE_SHARE])
    first = usable[0][0]
    prefix = None
    if all(sequence[0] == first for sequence in usable):
        prefix = first_token(model, first)
    note(f"rounding {len(model.layers)} layers, scales from {observed.tokens} tokens")
    return Quantized(model, _plan(model, observed), prefix)


def _plan(model: FusedModel, observed: Observed) -> QuantPlan:
    matrices = {}
    for index, layer in enumerate(model.layers):
        for name, matrix in layer.matrices():
            matrices[index, name] = QuantMatrix(*quantize_columns(matrix), observed.input_scale(index, name))
    head = len(model.layers)
    matrices[head, "head"] = QuantMatrix(*quantize_columns(model.head), observed.input_scale(head, "head"))
    return QuantPlan(matrices)
