"""The ONNX graph of a `FusedModel`, written node by node, in float32 or with INT8 Q/DQ around every matrix.

Inputs, with B sequences, S new positions, P past positions and L asked positions, all dynamic:
    input_ids int64 (B, S); position_ids int64 (B, S); attention_bias float32 (B, 1, S, P+S), additive;
    logits_at int64 (B, L), indices into S; past_k.{i}, past_v.{i} float32 (B, G, P, D).
Outputs:
    logits float32 (B, L, V); new_k.{i}, new_v.{i} float32 (B, G, S, D): the new positions only, rotary applied.

Hand-written because every node costs 1–3 µs of a decode step. What that buys over a traced graph: the cache is never
concatenated (past and new positions are scored apart and joined in front of the softmax), one transpose serves
queries, keys and values, the rotary embedding is one small product instead of slices, and the keys' transpose
disappears into the product. Only operators of opset 18 that TensorRT 10.3 parses are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from models.graph.fused import Array, FusedLayer, FusedModel, half_turn, rope_tables
from models.graph.int8 import LEVELS
from models.graph.rotate import hadamard

OPSET = 18
CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators. A graph that has one of them runs nowhere else."""
DATA_FILE = "model.onnx.data"
_INLINE_BYTES = 4096  # larger initializers go to the data file, which runtimes map instead of reading
_ALIGNMENT = 4096
_DIGIT_OFFSET = 128
_TOKENIZER_BYTES = 80  # of tokenizer.json for each token, merges included; Llama 3's has 71


@dataclass(frozen=True)
class QuantMatrix:
    """A symmetric INT8 matrix: weight ≈ values · scale, input ≈ round(input / input_scale) · input_scale.

    Attributes:
        values: int8 (in, out).
        scale: float32 (out,).
        input_scale: per tensor.
    """

    values: npt.NDArray[np.int8]
    scale: Array
    input_scale: float


@dataclass(frozen=True)
class QuantPlan:
    """INT8 forms by (layer, matrix name); the head is (num_layers, "head")."""

    matrices: dict[tuple[int, str], QuantMatrix]


def pack_rows(table: Array) -> tuple[npt.NDArray[np.int32], Array]:
    """Round an embedding (V, H) to 8 bits per row and pack four values into an int32.

    INT8 constants would be plainer, but TensorRT takes one only in front of a DequantizeLinear, and one over the whole
    table would be computed at every step. The first quarter of a row lies in the top digits, signed; the other
    quarters are offset by 128, so that the lower 24 bits keep away from a carry and float32 finds the top digit.

    Returns:
        int32 (V, H/4) and float32 scales (V,).
    """
    largest = np.maximum(np.abs(table).max(axis=1), np.finfo(np.float32).tiny * LEVELS)
    scale: Array = (largest / LEVELS).astype(np.float32)
    quarters = np.rint(table / scale[:, None]).astype(np.int32).reshape(len(table), 4, -1)
    packed = quarters[:, 0] << 24
    for index, bits in ((1, 16), (2, 8), (3, 0)):
        packed |= (quarters[:, index] + _DIGIT_OFFSET) << bits
    return packed, scale


class GraphWriter:
    """Collects nodes and initializers; large initializers go to an external data file at once."""

    def __init__(self, directory: Path) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._directory = directory
        self._data = (directory / DATA_FILE).open("wb")

    def add(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def split(self, source: str, outputs: Sequence[str], axis: int, sizes: str) -> Sequence[str]:
        self.nodes.append(helper.make_node("Split", [source, sizes], list(outputs), name=outputs[0], axis=axis))
        return outputs

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        """Store `value` under `name`, once."""
        if name in self._initializers:
            return name
        value = np.asarray(value, order="C")  # ascontiguousarray would make a vector of a scalar
        tensor = TensorProto(name=name, dims=value.shape, data_type=helper.np_dtype_to_tensor_dtype(value.dtype))
        if value.nbytes <= _INLINE_BYTES:
            tensor.raw_data = value.tobytes()
        else:
            self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": DATA_FILE, "offset": self._data.tell(), "length": value.nbytes}
            for key, item in place.items():
                tensor.external_data.add(key=key, value=str(item))
            self._data.write(value)  # type: ignore[arg-type]
        self._initializers[name] = tensor
        return name

    def ints(self, *values: int) -> str:
        name = "ints_" + "_".join(str(value) for value in values)
        return self.constant(name.replace("-", "m"), np.array(values, np.int64))

    def __enter__(self) -> GraphWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()

    def save(self, graph_io: tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]], name: str) -> Path:
        """Write `model.onnx` beside the data file and return its path."""
        self._data.close()
        graph = helper.make_graph(self.nodes, name, *graph_io, initializer=list(self._initializers.values()))
        used = [helper.make_opsetid("", OPSET)]
        if any(node.domain == CONTRIB for node in self.nodes):
            used.append(helper.make_opsetid(CONTRIB, 1))
        model = helper.make_model(graph, opset_imports=used, producer_name="overspill")
        model.ir_version = 9
        path = self._directory / "model.onnx"
        path.write_bytes(model.SerializeToString(deterministic=True))
        return path


def write_graph(model: FusedModel, directory: Path, plan: QuantPlan | None = None) -> Path:
    """Write `model.onnx` and its data file into `directory`; with a `plan`, in INT8.

    Returns:
        The path of `model.onnx`.
    """
    with GraphWriter(directory) as writer:
        return _ModelGraph(model, writer, plan).write()


def artifact_bytes(model: FusedModel, weight_bytes: int) -> int:
    """Return about what an artifact takes on the disk, with tokenizer and graph, at so many bytes a weight."""
    weights = sum(matrix.size for layer in model.layers for _, matrix in layer.matrices())
    weights += model.head.size + model.embedding.size
    rope = 2 * 4 * model.config.max_context_tokens * model.config.head_dim
    return weight_bytes * weights + rope + _TOKENIZER_BYTES * model.config.vocab_size


class _ModelGraph:
    def __init__(self, model: FusedModel, writer: GraphWriter, plan: QuantPlan | None) -> None:
        self.model, self.writer, self.plan = model, writer, plan
        config = model.config
        self.groups, self.members, self.dim = config.num_kv_heads, model.group_size, config.head_dim

    def write(self) -> Path:
        self._frame()
        x = self._embed()
        for index, layer in enumerate(self.model.layers):
            x = self.writer.add("Add", [x, self._attention(index, layer, x)], f"l{index}.mid")
            x = self.writer.add("Add", [x, self._mlp(index, layer, x)], f"l{index}.out")
        self._logits(x)
        return self.writer.save(self._io(), "overspill_decoder")

    def _io(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        def value(name: str, kind: int, *dims: str | int) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, kind, list(dims))

        inputs = [
            value("input_ids", TensorProto.INT64, "B", "S"),
            value("position_ids", TensorProto.INT64, "B", "S"),
            value("attention_bias", TensorProto.FLOAT, "B", 1, "S", "P+S"),
            value("logits_at", TensorProto.INT64, "B", "L"),
        ]
        outputs = [value("logits", TensorProto.FLOAT, "B", "L", self.model.config.vocab_size)]
        for index in range(len(self.model.layers)):
            for part in "kv":
                inputs.append(value(f"past_{part}.{index}", TensorProto.FLOAT, "B", self.groups, "P", self.dim))
                outputs.append(value(f"new_{part}.{index}", TensorProto.FLOAT, "B", self.groups, "S", self.dim))
        return inputs, outputs

    def _frame(self) -> None:
        """What all layers share: rotary tables at the positions, the bias per query row, where to split scores."""
        w = self.writer
        for name, table in zip(
            ("cos", "sin"), rope_tables(self.model.config, self.model.config.max_context_tokens), strict=True
        ):
            rows = w.add("Gather", [w.constant(f"{name}_table", table), "position_ids"], f"{name}_rows")
            w.add("Unsqueeze", [rows, w.ints(1)], name)
        w.constant("half_turn", half_turn(self.dim))
        w.add("Concat", ["attention_bias"] * self.members, "row_bias", axis=2)
        lengths = [
            w.add("Shape", ["past_k.0"], "past_length", start=2, end=3),
            w.add("Shape", ["input_ids"], "new_length", start=1, end=2),
        ]
        w.add("Concat", lengths, "score_split", axis=0)

    def _embed(self) -> str:
        w = self.writer
        if self.plan is None:
            return w.add("Gather", [w.constant("embedding", self.model.embedding), "input_ids"], "embedded")
        if self.model.embedding.shape[1] % 4:
            table = w.constant("embedding", self.model.embedding.astype(np.float16))
            rows = w.add("Gather", [table, "input_ids"], "embedded_half")
            return w.add("Cast", [rows], "embedded", to=TensorProto.FLOAT)
        packed, scales = pack_rows(self.model.embedding)
        digits = self._unpack(w.add("Gather", [w.constant("embedding", packed), "input_ids"], "embedded_packed"))
        scale = w.add("Gather", [w.constant("embedding_scale", scales[:, None]), "input_ids"], "row_scale")
        return w.add("Mul", [digits, scale], "embedded")

    def _unpack(self, packed: str) -> str:
        """Undo `pack_rows`: (B, S, H/4) int32 to (B, S, H) float32, exactly, in arithmetic that every runtime has."""
        w = self.writer
        rough = w.add("Cast", [packed], "embedded_rough", to=TensorProto.FLOAT)
        top = self._shifted(rough, 24)
        whole = w.add("Cast", [top], "embedded_top_int", to=TensorProto.INT32)
        whole = w.add("Mul", [whole, w.constant("two_24", np.array(1 << 24, np.int32))], "embedded_top_bits")
        rest = w.add("Cast", [w.add("Sub", [packed, whole], "embedded_low_bits")], "embedded_low", to=TensorProto.FLOAT)
        digits = [top]
        for bits in (16, 8):
            digit = self._shifted(rest, bits)
            back = w.constant(f"two_{bits}_float", np.array(1 << bits, np.float32))
            rest = w.add("Sub", [rest, w.add("Mul", [digit, back], f"embedded_above_{bits}")], f"embedded_below_{bits}")
            digits.append(digit)
        joined = w.add("Concat", [*digits, rest], "embedded_digits", axis=-1)
        quarter = self.model.embedding.shape[1] // 4
        offset = np.repeat(np.array([0, _DIGIT_OFFSET, _DIGIT_OFFSET, _DIGIT_OFFSET], np.float32), quarter)
        return w.add("Sub", [joined, w.constant("digit_offset", offset)], "embedded_values")

    def _shifted(self, x: str, bits: int) -> str:
        """Floor of x / 2^bits."""
        w = self.writer
        scaled = w.add("Mul", [x, w.constant(f"two_minus_{bits}", np.array(2.0**-bits, np.float32))], f"scaled_{bits}")
        return w.add("Floor", [scaled], f"embedded_digit_{bits}")

    def _norm(self, x: str, gain: npt.NDArray[Any], name: str) -> str:
        """RMSNorm in the form that runtimes fuse."""
        w = self.writer
        epsilon = w.constant("epsilon", np.array(self.model.config.rms_norm_eps, np.float32))
        square = w.add("Pow", [x, w.constant("two", np.array(2.0, np.float32))], f"{name}.square")
        mean = w.add("ReduceMean", [square, w.ints(-1)], f"{name}.mean", keepdims=1)
        root = w.add("Sqrt", [w.add("Add", [mean, epsilon], f"{name}.shifted")], f"{name}.root")
        unit = w.add("Div", [x, root], f"{name}.unit")
        return w.add("Mul", [unit, w.constant(f"{name}.gain", gain)], name)

    def _matmul(self, index: int, matrix: str, x: str, weight: Array) -> str:
        w, name = self.writer, f"l{index}.{matrix}"
        if self.plan is None:
            return w.add("MatMul", [x, w.constant(f"{name}.weight", weight)], name)
        quant = self.plan.matrices[index, matrix]
        zero = w.constant("zero_point", np.zeros((), np.int8))
        scale = w.constant(f"{name}.input_scale", np.array(quant.input_scale, np.float32))
        q = w.add("QuantizeLinear", [x, scale, zero], f"{name}.input_q")
        dq = w.add("DequantizeLinear", [q, scale, zero], f"{name}.input_dq")
        zeros = w.constant(f"{name}.zero_points", np.zeros(len(quant.scale), np.int8))
        parts = [w.constant(f"{name}.weight", quant.values), w.constant(f"{name}.scale", quant.scale), zeros]
        return w.add("MatMul", [dq, w.add("DequantizeLinear", parts, f"{name}.weight_dq", axis=1)], name)

    def _attention(self, index: int, layer: FusedLayer, x: str) -> str:
        w, at, n, groups = self.writer, f"l{index}", self.members, self.groups
        normed = self._norm(x, layer.attention_gain, f"{at}.attention_norm")
        qkv = self._matmul(index, "qkv", normed, layer.qkv)
        if layer.qkv_bias is not None:
            qkv = w.add("Add", [qkv, w.constant(f"{at}.qkv.bias", layer.qkv_bias)], f"{at}.qkv_biased")
        heads = w.add("Reshape", [qkv, w.ints(0, 0, (n + 2) * groups, self.dim)], f"{at}.heads")
        heads = w.add("Transpose", [heads], f"{at}.by_head", perm=[0, 2, 1, 3])
        qk, v = w.split(heads, [f"{at}.qk", f"new_v.{index}"], 1, w.ints((n + 1) * groups, groups))
        gains = layer.head_gains(groups, n)
        if gains is not None:
            qk = self._norm(qk, gains, f"{at}.qk_norm")
        turned = w.add("Mul", [w.add("MatMul", [qk, "half_turn"], f"{at}.half"), "sin"], f"{at}.half_sin")
        qk = w.add("Add", [w.add("Mul", [qk, "cos"], f"{at}.qk_cos"), turned], f"{at}.qk_turned")
        q, k = w.split(qk, [f"{at}.q", f"new_k.{index}"], 1, w.ints(n * groups, groups))
        q = w.add("Reshape", [q, w.ints(0, groups, -1, self.dim)], f"{at}.q_rows")
        mixed = self._attend(index, q, k, v)
        mixed = w.add("Reshape", [mixed, w.ints(0, n * groups, -1, self.dim)], f"{at}.mixed_heads")
        mixed = w.add("Transpose", [mixed], f"{at}.by_position", perm=[0, 2, 1, 3])
        mixed = w.add("Reshape", [mixed, w.ints(0, 0, n * groups * self.dim)], f"{at}.mixed_rows")
        return self._matmul(index, "o", mixed, layer.o)

    def _attend(self, index: int, q: str, k: str, v: str) -> str:
        w, at = self.writer, f"l{index}"
        scores = []
        for part, keys in (("past", f"past_k.{index}"), ("new", k)):
            columns = w.add("Transpose", [keys], f"{at}.{part}_columns", perm=[0, 1, 3, 2])
            scores.append(w.add("MatMul", [q, columns], f"{at}.{part}_scores"))
        joined = w.add("Concat", scores, f"{at}.scores", axis=3)
        weights = w.add("Softmax", [w.add("Add", [joined, "row_bias"], f"{at}.biased")], f"{at}.weights", axis=3)
        past, new = w.split(weights, [f"{at}.past_weights", f"{at}.new_weights"], 3, "score_split")
        mixed = [
            w.add("MatMul", [past, f"past_v.{index}"], f"{at}.past_mixed"),
            w.add("MatMul", [new, v], f"{at}.new_mixed"),
        ]
        return w.add("Add", mixed, f"{at}.mixed")

    def _mlp(self, index: int, layer: FusedLayer, x: str) -> str:
        w, at = self.writer, f"l{index}"
        wide = layer.down.shape[0]
        normed = self._norm(x, layer.mlp_gain, f"{at}.mlp_norm")
        both = self._matmul(index, "gate_up", normed, layer.gate_up)
        gate, up = w.split(both, [f"{at}.gate", f"{at}.up"], 2, w.ints(wide, wide))
        silu = w.add("Mul", [gate, w.add("Sigmoid", [gate], f"{at}.sigmoid")], f"{at}.silu")
        hidden = w.add("Mul", [silu, up], f"{at}.hidden")
        block = layer.down_block
        if block:
            blocks = w.add("Reshape", [hidden, w.ints(0, 0, wide // block, block)], f"{at}.blocks")
            blocks = w.add("MatMul", [blocks, w.constant(f"hadamard_{block}", hadamard(block))], f"{at}.turned")
            hidden = w.add("Reshape", [blocks, w.ints(0, 0, wide)], f"{at}.hidden_turned")
        return self._matmul(index, "down", hidden, layer.down)

    def _logits(self, x: str) -> None:
        w = self.writer
        at = w.add("Unsqueeze", ["logits_at", w.ints(-1)], "rows_at")
        rows = w.add("GatherND", [x, at], "asked", batch_dims=1)
        normed = self._norm(rows, self.model.head_gain, "head_norm")
        index = len(self.model.layers)
        self._matmul(index, "head", normed, self.model.head)
        self.writer.nodes[-1].output[0] = "logits"
