"""Matrix products with a fixed weight: plain, or W8A8 on a CPU.

W8A8: the weight is int8 with a scale for each output channel, rounded once and packed for this CPU; the input is
rounded anew in every step with a scale for each token, so no token's answer depends on its company. Products are summed
in int32 and scaled back in float32. CPUs without VNNI first add two of them in 16 bits, which hold 255 · 64 twice, but
not 255 · 127: there the weight is rounded to 7 bits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from cloud_tier.engine.rotate import hadamard, hadamard_block
from router.base.errors import ConfigError

_LARGEST = 127.0
_LARGEST_IN_PAIRS = 64.0  # of a weight, where two products are added in 16 bits: 2 · 255 · 64 fits, 65 does not
_TOP = torch.tensor(_LARGEST)  # a Python number is made into a tensor at each use
_SMALLEST = 1e-12  # a token whose inputs are all smaller is taken for 0
_MIDDLE = 128  # oneDNN's fast kernels take unsigned inputs: zero is stored as this


class Product(Protocol):
    """A linear layer: (tokens, in) → (tokens, out)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight (out, in) and perhaps a bias (out,), in the dtype of what they are applied to."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The same on a CPU in bfloat16, the weight once and for all in the layout of this CPU's kernels."""

    packed: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _packed_linear(x, self.packed, self.bias)


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear | PackedLinear:
    """Return the product with a weight (out, in), packed where that is faster."""
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
        packed = _pack(weight)
        return Linear(weight, bias) if packed is None else PackedLinear(packed, bias)
    return Linear(weight, bias)


@dataclass(frozen=True, slots=True)
class Normed:
    """RMSNorm with a gain (in,), and a linear layer behind it."""

    gain: torch.Tensor
    eps: float
    linear: Linear | PackedLinear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.rms_norm(x, x.shape[-1:], self.gain, self.eps))


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """W8A8. Takes and returns float32.

    Attributes:
        packed: int8 weight in the layout of this CPU's kernels.
        scales: float32 (out,), one for each output channel, times the step of an input whose largest number is 1.
        zeros: int64 (out,), the zero points: all 0.
        floor: the input passes RMSNorm first, without a gain, which changes nothing but its scale: float32 (),
            sqrt(in · eps) of that norm, and `scales` are sqrt(in) times as large. None for no norm.
        turn: float32 (block, block), applied to each block of the input first; None leaves it as it is.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor | None
    floor: torch.Tensor | None
    turn: torch.Tensor | None

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        eps: float | None = None,
        turned: bool = False,
    ) -> Int8Linear:
        """Round a float32 weight (out, in).

        Args:
            eps: of an RMSNorm before it, see `Int8Linear`; None for no norm.
            turned: spread large inputs over Hadamard blocks before they are rounded.

        Raises:
            ConfigError: this build of torch has no such kernels.
        """
        turn = hadamard(hadamard_block(weight.shape[1])) if turned else None
        if turn is not None:
            weight = _turned(weight, turn)
        try:
            largest = largest_weight()
        except (AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"dtype = 'int8' needs torch with oneDNN, and this one has none ({error}); set dtype = 'float32'",
                param="models.dtype",
            ) from error
        scales = weight.abs().amax(dim=1).clamp_min_(torch.finfo(torch.float32).tiny) / largest
        packed = torch.ops.onednn.qlinear_prepack((weight / scales.unsqueeze(1)).round_().to(torch.int8), None)
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        width = weight.shape[1]
        floor = None if eps is None else torch.tensor(math.sqrt(width * eps))
        unit = _LARGEST if eps is None else _LARGEST / math.sqrt(width)
        return cls(packed, scales / unit, zeros, bias, floor, turn)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.turn is not None:
            x = _turned(x, self.turn)
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_min_(_SMALLEST)
        # Conversion to int8 is four times as fast as to uint8; turning the sign bit over adds the zero point.
        rounded = (x * (_TOP / largest)).round_().to(torch.int8).view(torch.uint8).bitwise_xor_(_MIDDLE)
        product: torch.Tensor = _qlinear(
            rounded, 1.0, _MIDDLE, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        if self.floor is not None:
            # 1 / sqrt(mean(x²) + eps) is sqrt(in) / hypot(|x|, sqrt(in · eps)).
            largest /= torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)
        product *= largest
        return product if self.bias is None else product.add_(self.bias)


@functools.cache
def largest_weight() -> float:
    """Return the largest rounded weight whose products this CPU sums exactly: 127, or 64 where it adds them in pairs.

    Found by such a product, since who knows which instructions a build of torch takes on which CPU.
    """
    width = 64
    packed = torch.ops.onednn.qlinear_prepack(torch.full((1, width), int(_LARGEST), dtype=torch.int8), None)
    ones, zeros = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    top = torch.full((1, width), 2 * _MIDDLE - 1, dtype=torch.uint8)
    found = _qlinear(top, 1.0, _MIDDLE, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return _LARGEST if found.item() == width * _LARGEST * (_MIDDLE - 1) else _LARGEST_IN_PAIRS


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Multiply each block of the last dimension, as wide as `turn`, by that matrix."""
    return (x.reshape(-1, len(turn)) @ turn).view(x.shape)


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Return a bfloat16 weight as oneDNN's kernels read it; None where this CPU or this build of torch has none."""
    kernels = torch.ops.mkldnn  # what torch's own compiler calls
    try:
        supported = kernels._is_mkldnn_bf16_supported()  # noqa: SLF001
        packed: torch.Tensor | None = kernels._reorder_linear_weight(weight, None) if supported else None  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return None
    return packed


def _packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001
    return product


def _qlinear(*arguments: Any) -> Any:
    return torch.ops.onednn.qlinear_pointwise(*arguments)
