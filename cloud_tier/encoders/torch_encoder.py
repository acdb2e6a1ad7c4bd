"""A sentence encoder on torch. Runs in a process of its own, which alone imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from models.formats.encoder import EncoderLayer, EncoderWeights, Matrix, Norm, read_encoder
from models.pipelines.embedding import Array, encoding, padded
from models.pipelines.stage import Work
from router.base.errors import ConfigError

if TYPE_CHECKING:
    import torch

_MASKED = -1e9


@dataclass(frozen=True, slots=True)
class OpenTorchEncoder:
    """Makes the encoder's function in the process that will compute; see `models.pipelines.stage.Opens`.

    Attributes:
        source: directory with config.json and model.safetensors.
        device: `cpu`, `cuda`, or `auto`: CUDA where torch finds a GPU.
        dtype: `float32`, `bfloat16` or `float16`.
        threads: of one operator.
    """

    source: Path
    device: str
    dtype: str
    threads: int

    def __call__(self) -> Work:
        """Load the weights.

        Raises:
            ConfigError: `cuda` is asked for, and torch finds no GPU.
            ArtifactError: a file is missing or damaged.
        """
        import torch  # noqa: PLC0415 - only here, in a process of its own

        torch.set_num_threads(self.threads)
        found = torch.cuda.is_available()
        if self.device == "cuda" and not found:
            raise ConfigError("device = `cuda`, and torch finds no GPU: set `cpu`, or `auto`", param="models.device")
        device = "cuda" if found and self.device != "cpu" else "cpu"
        encoder = TorchEncoder(read_encoder(self.source), torch.device(device), getattr(torch, self.dtype))
        encoder.encode([[0]])
        return partial(encoding, encoder.encode)


class TorchEncoder:
    """The weights on a device, and what is computed with them."""

    def __init__(self, weights: EncoderWeights, device: torch.device, dtype: torch.dtype) -> None:
        import torch  # noqa: PLC0415 - as above

        self._torch = torch
        self._device, self._dtype = device, dtype
        config = weights.config
        self._heads, self._head_dim, self._epsilon = config.num_attention_heads, config.head_dim, config.layer_norm_eps
        self._words, self._positions = self._put(weights.words), self._put(weights.positions)
        self._norm = self._pair(weights.norm)
        self._layers = [self._layer(layer) for layer in weights.layers]

    def _put(self, array: Array) -> torch.Tensor:
        return self._torch.from_numpy(array).to(self._device, self._dtype)

    def _pair(self, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return self._put(norm.gain), self._put(norm.bias)

    def _matrix(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
        return self._put(matrix.weight).T.contiguous(), self._put(matrix.bias)

    def _layer(self, layer: EncoderLayer) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        matrices = {"qkv": layer.qkv, "out": layer.out, "up": layer.up, "down": layer.down}
        norms = {"attention_norm": layer.attention_norm, "norm": layer.norm}
        return {name: self._matrix(matrix) for name, matrix in matrices.items()} | {
            name: self._pair(norm) for name, norm in norms.items()
        }

    def encode(self, batch: list[list[int]]) -> Array:
        """Return the mean of the token vectors of each text, float32 (B, H)."""
        torch = self._torch
        raw_ids, raw_mask = padded(batch)
        with torch.inference_mode():
            ids = torch.from_numpy(raw_ids).to(self._device)
            mask = torch.from_numpy(raw_mask).to(self._device, self._dtype)
            x = self._normed(self._words[ids] + self._positions[: ids.shape[1]], self._norm)
            bias = (1 - mask)[:, None, None, :] * _MASKED
            for layer in self._layers:
                x = self._layered(x, layer, bias)
            weights = mask[:, :, None].float()
            pooled = (x.float() * weights).sum(dim=1) / weights.sum(dim=1)
            found: Array = pooled.cpu().numpy()
        return found

    def _layered(
        self, x: torch.Tensor, layer: dict[str, tuple[torch.Tensor, torch.Tensor]], bias: torch.Tensor
    ) -> torch.Tensor:
        functional = self._torch.nn.functional
        batch, length, size = x.shape
        split = functional.linear(x, *layer["qkv"]).view(batch, length, 3, self._heads, self._head_dim)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)  # 1/√d is in the weights
        rows = mixed.transpose(1, 2).reshape(batch, length, size)
        x = self._normed(x + functional.linear(rows, *layer["out"]), layer["attention_norm"])
        hidden = functional.gelu(functional.linear(x, *layer["up"]))
        return self._normed(x + functional.linear(hidden, *layer["down"]), layer["norm"])

    def _normed(self, x: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self._torch.nn.functional.layer_norm(x, x.shape[-1:], *norm, eps=self._epsilon)
