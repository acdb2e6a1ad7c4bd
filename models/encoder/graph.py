"""The ONNX graph of a sentence encoder, written node by node, in float32 or with 8-bit matrices.

Inputs, with B texts of at most S tokens, both dynamic:
    input_ids int64 (B, S), padded with any id; mask float32 (B, S), 1 for tokens and 0 for padding.
Output:
    pooled float32 (B, H): the mean over the tokens of each text, not normalised.

In 8 bits, weights are rounded with a scale for each output, and inputs with a scale for each row, found while they are
computed: a vector does not depend on its company. Static Q/DQ with one scale for a whole input, which TensorRT would
take, loses a fortieth of the cosine here, since a few channels are a hundred times larger than the rest
(docs/decisions.md).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from models.formats.encoder import EncoderLayer, EncoderWeights, Matrix, Norm
from models.graph.graph import GraphWriter
from models.graph.int8 import LEVELS, quantize_columns

_ZERO = 128  # rows are rounded to unsigned numbers around it: CPUs multiply unsigned by signed fastest
_MASKED = -1e9


def write_encoder(weights: EncoderWeights, directory: Path, *, int8: bool) -> Path:
    """Write `model.onnx` and its data file into `directory`; returns the path of `model.onnx`."""
    with GraphWriter(directory) as writer:
        return _EncoderGraph(weights, writer, int8).write()


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
        bias = w.constant(f"{name}.bias", matrix.bias)
        if not self.int8:
            product = w.add("MatMul", [x, w.constant(f"{name}.weight", matrix.weight)], name)
            return w.add("Add", [product, bias], f"{name}.biased")
        values, scales = quantize_columns(matrix.weight)
        rounded, row_scale = self._rounded(f"{name}.input", x)
        zero = w.constant("row_zero", np.array(_ZERO, np.uint8))
        whole = w.add("MatMulInteger", [rounded, w.constant(f"{name}.weight", values), zero], f"{name}.whole")
        product = w.add("Cast", [whole], f"{name}.float", to=TensorProto.FLOAT)
        product = w.add("Mul", [product, w.constant(f"{name}.scale", scales)], f"{name}.columns")
        return w.add("Add", [w.add("Mul", [product, row_scale], name), bias], f"{name}.biased")

    def _rounded(self, name: str, x: str) -> tuple[str, str]:
        """Round every row by its own largest number; returns uint8 around 128, and the scales (B, S, 1)."""
        w = self.writer
        largest = w.add("ReduceMax", [w.add("Abs", [x], f"{name}.size"), w.ints(-1)], f"{name}.largest", keepdims=1)
        step = w.add("Mul", [largest, w.constant("level", np.array(1 / LEVELS, np.float32))], f"{name}.step")
        scale = w.add("Max", [step, w.constant("tiny", np.array(1e-30, np.float32))], f"{name}.scale")
        steps = w.add("Round", [w.add("Div", [x, scale], f"{name}.scaled")], f"{name}.steps")
        shifted = w.add("Add", [steps, w.constant("shift", np.array(_ZERO, np.float32))], f"{name}.shifted")
        return w.add("Cast", [shifted], f"{name}.rounded", to=TensorProto.UINT8), scale

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
