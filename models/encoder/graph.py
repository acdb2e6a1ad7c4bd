"""The ONNX graph of a sentence encoder, written node by node, in float32 or with 8-bit matrices.

Inputs, with B texts of at most S tokens, both dynamic:
    input_ids int64 (B, S), padded behind each text with any id; mask float32 (B, S), 1 for tokens and 0 for padding.
Output:
    pooled float32 (B, H): the mean over the tokens of each text, not normalised.

Between them the T tokens of all texts, without the padding, are the rows of one matrix (T, H). Attention alone looks at
texts: for it queries, keys and values are gathered as (S, B, heads, D), which is how products of batches read them
without a transpose (ONNX Runtime fuses those written here), and what it finds goes back to the tokens' rows.

In 8 bits, weights are rounded with a scale for each output, and inputs with a scale for each row, found while they are
computed: a vector does not depend on its company. Static Q/DQ with one scale for a whole input, which TensorRT would
take, loses a fortieth of the cosine here, since a few channels are a hundred times larger than the rest
(docs/experiments.md). Rows are rounded by one operator with a scale for each of them, and ONNX Runtime's own
`MatMulIntegerToFloat` and `BiasGelu` stand for what would be seven passes over the memory. That graph is ONNX Runtime's
alone; the one in float32 has only operators that every runtime knows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from models.formats.encoder import EncoderLayer, EncoderWeights, Matrix, Norm
from models.graph.graph import CONTRIB, GraphWriter
from models.graph.int8 import LEVELS, quantize_columns

_ZERO = 128  # rows are rounded to unsigned numbers around it: CPUs multiply unsigned by signed fastest
_MASKED = -1e9
_GELU_DEPTH = 0.17  # GELU is nowhere below minus this: where it was applied, the largest number is the largest size


def write_encoder(weights: EncoderWeights, directory: Path, *, int8: bool) -> Path:
    """Write `model.onnx` and its data file into `directory`; returns the path of `model.onnx`."""
    with GraphWriter(directory) as writer:
        return _EncoderGraph(weights, writer, int8).write()


class _EncoderGraph:
    def __init__(self, weights: EncoderWeights, writer: GraphWriter, int8: bool) -> None:
        self.weights, self.writer, self.int8 = weights, writer, int8

    def write(self) -> Path:
        w, size = self.writer, self.weights.config.hidden_size
        self._frame()
        x = self._embed()
        if self.int8:
            count = w.add("Shape", [x], "row_count", start=0, end=1)
            zero = helper.make_tensor("zero", TensorProto.UINT8, [1], [_ZERO])
            w.add("ConstantOfShape", [count], "row_zeros", value=zero)
        for index, layer in enumerate(self.weights.layers):
            x = self._layer(index, layer, x)
        self._pool(x)
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"]),
            helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["B", "S"]),
        ]
        outputs = [helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["B", size])]
        return w.save((inputs, outputs), "overspill_encoder")

    def _frame(self) -> None:
        """What all layers share: where each token is among the padded, and what attention adds to hide the padding.

        Where there is no token, attention gathers the last row of the same text: what is no number stays in its text.
        """
        w = self.writer
        given = w.add("Reshape", ["mask", w.ints(-1)], "given")
        w.add("Squeeze", [w.add("NonZero", [given], "found"), w.ints(0)], "places")
        count = w.add("CumSum", [given, w.constant("first_axis", np.array(0))], "tokens_so_far")
        row = w.add("Sub", [w.add("Cast", [count], "rows_so_far", to=TensorProto.INT64), w.ints(1)], "row")
        by_text = w.add("Reshape", [row, w.add("Shape", ["mask"], "texts")], "rows_by_text")
        by_position = w.add("Transpose", [by_text], "rows_by_position", perm=[1, 0])
        thirds = w.add("Mul", [by_position, w.ints(3)], "thirds")  # of rows that hold queries, keys and values
        for index, part in enumerate("qkv"):
            w.add("Add", [thirds, w.ints(index)], f"{part}_thirds")
        columns = w.add("Unsqueeze", ["mask", w.ints(1, 2)], "mask_columns")
        padding = w.add("Sub", [w.constant("one", np.array(1.0, np.float32)), columns], "padding")
        w.add("Mul", [padding, w.constant("masked", np.array(_MASKED, np.float32))], "attention_bias")

    def _embed(self) -> str:
        w, weights = self.writer, self.weights
        ids = w.add("Gather", [w.add("Reshape", ["input_ids", w.ints(-1)], "padded_ids"), "places"], "ids")
        words = w.add("Gather", [w.constant("words", weights.words), ids], "word_rows")
        length = w.add("Shape", ["input_ids"], "length", start=1, end=2)
        at = w.add("Mod", ["places", length], "position")
        rows = w.add("Gather", [w.constant("positions", weights.positions), at], "position_rows")
        return self._norm(w.add("Add", [words, rows], "embedded"), weights.norm, "embedding_norm")

    def _layer(self, index: int, layer: EncoderLayer, x: str) -> str:
        w, at = self.writer, f"l{index}"
        mixed = self._linear(f"{at}.out", self._attention(at, layer, x), layer.out)
        x = self._norm(w.add("Add", [x, mixed], f"{at}.mid"), layer.attention_norm, f"{at}.attention_norm")
        down = self._linear(f"{at}.down", self._expanded(at, layer, x), layer.down, _GELU_DEPTH)
        return self._norm(w.add("Add", [x, down], f"{at}.sum"), layer.norm, f"{at}.norm")

    def _attention(self, at: str, layer: EncoderLayer, x: str) -> str:
        w, config = self.writer, self.weights.config
        heads = w.ints(-1, config.num_attention_heads, config.head_dim)
        parts = w.add("Reshape", [self._linear(f"{at}.qkv", x, layer.qkv), heads], f"{at}.parts")
        q, k, v = (w.add("Gather", [parts, f"{part}_thirds"], f"{at}.{part}") for part in "qkv")
        q, v = (w.add("Transpose", [part], f"{part}.heads", perm=[1, 2, 0, 3]) for part in (q, v))
        columns = w.add("Transpose", [k], f"{at}.columns", perm=[1, 2, 3, 0])
        scores = w.add("Add", [w.add("MatMul", [q, columns], f"{at}.scores"), "attention_bias"], f"{at}.biased")
        mixed = w.add("MatMul", [w.add("Softmax", [scores], f"{at}.weights", axis=-1), v], f"{at}.mixed")
        rows = w.add("Transpose", [mixed], f"{at}.by_position", perm=[0, 2, 1, 3])
        rows = w.add("Reshape", [rows, w.ints(-1, config.hidden_size)], f"{at}.padded")
        return w.add("Gather", [rows, "places"], f"{at}.rows")

    def _expanded(self, at: str, layer: EncoderLayer, x: str) -> str:
        w = self.writer
        if not self.int8:
            return self._gelu(f"{at}.gelu", self._linear(f"{at}.up", x, layer.up))
        bias = w.constant(f"{at}.up.bias", layer.up.bias)
        return w.add("BiasGelu", [self._product(f"{at}.up", x, layer.up, None), bias], f"{at}.gelu", domain=CONTRIB)

    def _linear(self, name: str, x: str, matrix: Matrix, depth: float | None = None) -> str:
        """X · weight + bias; `depth` as in `_rounded`."""
        bias = self.writer.constant(f"{name}.bias", matrix.bias)
        return self.writer.add("Add", [self._product(name, x, matrix, depth), bias], f"{name}.biased")

    def _product(self, name: str, x: str, matrix: Matrix, depth: float | None) -> str:
        w = self.writer
        if not self.int8:
            return w.add("MatMul", [x, w.constant(f"{name}.weight", matrix.weight)], name)
        values, scales = quantize_columns(matrix.weight)
        rounded, row_scale = self._rounded(f"{name}.input", x, depth)
        factors = [
            w.constant(f"{name}.weight", values),
            w.constant("one", np.array(1.0, np.float32)),
            w.constant(f"{name}.scale", scales),
            w.constant("zero", np.array(_ZERO, np.uint8)),
        ]
        whole = w.add("MatMulIntegerToFloat", [rounded, *factors], f"{name}.columns", domain=CONTRIB)
        return w.add("Mul", [whole, row_scale], name)

    def _rounded(self, name: str, x: str, depth: float | None) -> tuple[str, str]:
        """Round every row by its own largest number.

        Args:
            depth: how far below zero the smallest number may be, which makes the sizes of numbers needless.

        Returns:
            uint8 (B·S, in) around 128, and the scales (B·S, 1).
        """
        w = self.writer
        least = ("tiny", 1e-30) if depth is None else ("depth", depth / LEVELS)
        sizes = w.add("Abs", [x], f"{name}.size") if depth is None else x
        largest = w.add("ReduceMax", [sizes, w.ints(-1)], f"{name}.largest", keepdims=1)
        step = w.add("Mul", [largest, w.constant("level", np.array(1 / LEVELS, np.float32))], f"{name}.step")
        scale = w.add("Max", [step, w.constant(least[0], np.array(least[1], np.float32))], f"{name}.scale")
        by_row = w.add("Reshape", [scale, w.ints(-1)], f"{name}.scale_by_row")
        return w.add("QuantizeLinear", [x, by_row, "row_zeros"], f"{name}.rounded", axis=0), scale

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
        rows = w.add("Gather", [x, "rows_by_text"], "last")
        sums = w.add("MatMul", [w.add("Unsqueeze", ["mask", w.ints(1)], "token_weights"), rows], "sums")
        count = w.add("ReduceSum", ["mask", w.ints(1)], "count", keepdims=1)
        w.add("Div", [w.add("Squeeze", [sums, w.ints(1)], "total"), count], "pooled")
