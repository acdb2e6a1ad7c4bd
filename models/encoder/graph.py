"""The ONNX graph of a sentence encoder, written node by node, in float32 or with 8-bit matrices.

Inputs, with B texts of at most S tokens, both dynamic:
    input_ids int64 (B, S), padded with any id; mask float32 (B, S), 1 for tokens and 0 for padding.
Output:
    pooled float32 (B, H): the mean over the tokens of each text, not normalised.

8-bit matrices are `MatMulNBits`: weights in blocks of 32 with a scale each, inputs rounded by block and row while they
are multiplied. Static Q/DQ with one scale for a whole input, which TensorRT would take, loses a fortieth of the cosine
here, since a few channels are a hundred times larger than the rest (docs/decisions.md); and with one scale found for
each batch (dynamic quantization), what a text becomes would depend on the texts beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from models.formats.encoder import Array, EncoderLayer, EncoderWeights, Matrix, Norm
from models.graph.graph import GraphWriter

_BLOCK = 32
_BITS = 8
_INT8_INPUTS = 4  # accuracy_level: inputs are rounded to int8 too, by block and row
_MASKED = -1e9


def write_encoder(weights: EncoderWeights, directory: Path, *, int8: bool) -> Path:
    """Write `model.onnx` and its data file into `directory`; returns the path of `model.onnx`."""
    with GraphWriter(directory) as writer:
        return _EncoderGraph(weights, writer, int8).write()


def round_blocks(weight: Array) -> tuple[npt.NDArray[np.uint8], Array]:
    """Round a matrix (in, out) to 8 bits, symmetric, in blocks of 32 inputs of one output.

    Returns:
        uint8 (out, in / 32, 32), offset by 128, and float32 scales (out, in / 32).
    """
    blocks = weight.T.reshape(weight.shape[1], -1, _BLOCK)
    largest = np.maximum(np.abs(blocks).max(axis=2), np.finfo(np.float32).tiny * 127)
    scales = (largest / 127).astype(np.float32)
    rounded = np.clip(np.rint(blocks / scales[:, :, None]), -127, 127).astype(np.int16)
    return (rounded + 128).astype(np.uint8), scales


class _EncoderGraph:
    def __init__(self, weights: EncoderWeights, writer: GraphWriter, int8: bool) -> None:
        self.weights, self.writer, self.int8 = weights, writer, int8

    def write(self) -> Path:
        w = self.writer
        x = self._embed()
        hidden = w.add("Unsqueeze", ["mask", w.ints(1, 2)], "mask_columns")
        one = w.constant("one", np.array(1.0, np.float32))
        off = w.add("Sub", [one, hidden], "padding")
        w.add("Mul", [off, w.constant("masked", np.array(_MASKED, np.float32))], "attention_bias")
        for index, layer in enumerate(self.weights.layers):
            x = self._layer(index, layer, x)
        self._pool(x)
        size = self.weights.config.hidden_size
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"]),
            helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["B", "S"]),
        ]
        outputs = [helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["B", size])]
        return w.save((inputs, outputs), "overspill_encoder")

    def _embed(self) -> str:
        w, weights = self.writer, self.weights
        words = w.add("Gather", [w.constant("words", weights.words), "input_ids"], "word_rows")
        length = w.add("Shape", ["input_ids"], "length", start=1, end=2)
        table = w.constant("positions", weights.positions)
        rows = w.add("Slice", [table, w.ints(0), length, w.constant("first_axis", np.array([0]))], "position_rows")
        return self._norm(w.add("Add", [words, rows], "embedded"), weights.norm, "embedding_norm")

    def _layer(self, index: int, layer: EncoderLayer, x: str) -> str:
        w, at = self.writer, f"l{index}"
        mixed = self._matmul(f"{at}.out", self._attention(at, layer, x), layer.out)
        x = self._norm(w.add("Add", [x, mixed], f"{at}.mid"), layer.attention_norm, f"{at}.attention_norm")
        up = self._gelu(f"{at}.gelu", self._matmul(f"{at}.up", x, layer.up))
        down = self._matmul(f"{at}.down", up, layer.down)
        return self._norm(w.add("Add", [x, down], f"{at}.sum"), layer.norm, f"{at}.norm")

    def _attention(self, at: str, layer: EncoderLayer, x: str) -> str:
        w, config = self.writer, self.weights.config
        heads = w.ints(0, 0, 3, config.num_attention_heads, config.head_dim)
        split = w.add("Reshape", [self._matmul(f"{at}.qkv", x, layer.qkv), heads], f"{at}.split")
        turned = w.add("Transpose", [split], f"{at}.by_head", perm=[2, 0, 3, 1, 4])
        q, k, v = (
            w.add("Squeeze", [part, w.ints(0)], f"{part}.heads")
            for part in w.split(turned, [f"{at}.q", f"{at}.k", f"{at}.v"], 0, w.ints(1, 1, 1))
        )
        columns = w.add("Transpose", [k], f"{at}.columns", perm=[0, 1, 3, 2])
        scores = w.add("Add", [w.add("MatMul", [q, columns], f"{at}.scores"), "attention_bias"], f"{at}.biased")
        mixed = w.add("MatMul", [w.add("Softmax", [scores], f"{at}.weights", axis=-1), v], f"{at}.mixed")
        rows = w.add("Transpose", [mixed], f"{at}.by_position", perm=[0, 2, 1, 3])
        return w.add("Reshape", [rows, w.ints(0, 0, config.hidden_size)], f"{at}.rows")

    def _matmul(self, name: str, x: str, matrix: Matrix) -> str:
        w = self.writer
        rows, columns = matrix.weight.shape
        if self.int8 and rows % _BLOCK == 0:
            values, scales = round_blocks(matrix.weight)
            parts = [w.constant(f"{name}.weight", values), w.constant(f"{name}.scale", scales.reshape(-1))]
            sizes: dict[str, Any] = {"K": rows, "N": columns, "bits": _BITS, "block_size": _BLOCK}
            product = w.add(
                "MatMulNBits", [x, *parts], name, domain="com.microsoft", accuracy_level=_INT8_INPUTS, **sizes
            )
        else:
            product = w.add("MatMul", [x, w.constant(f"{name}.weight", matrix.weight)], name)
        return w.add("Add", [product, w.constant(f"{name}.bias", matrix.bias)], f"{name}.biased")

    def _gelu(self, name: str, x: str) -> str:
        """X · (1 + erf(x / √2)) / 2, in the form that runtimes fuse."""
        w = self.writer
        scaled = w.add("Div", [x, w.constant("root_two", np.array(2.0**0.5, np.float32))], f"{name}.scaled")
        step = w.add("Add", [w.add("Erf", [scaled], f"{name}.erf"), "one"], f"{name}.step")
        product = w.add("Mul", [x, step], f"{name}.product")
        return w.add("Mul", [product, w.constant("half", np.array(0.5, np.float32))], name)

    def _norm(self, x: str, norm: Norm, name: str) -> str:
        w = self.writer
        parts = [w.constant(f"{name}.gain", norm.gain), w.constant(f"{name}.bias", norm.bias)]
        epsilon = self.weights.config.layer_norm_eps
        return w.add("LayerNormalization", [x, *parts], name, axis=-1, epsilon=epsilon)

    def _pool(self, x: str) -> None:
        w = self.writer
        weights = w.add("Unsqueeze", ["mask", w.ints(-1)], "token_weights")
        total = w.add("ReduceSum", [w.add("Mul", [x, weights], "kept"), w.ints(1)], "total", keepdims=0)
        count = w.add("ReduceSum", ["mask", w.ints(1)], "count", keepdims=1)
        w.add("Div", [total, count], "pooled")
