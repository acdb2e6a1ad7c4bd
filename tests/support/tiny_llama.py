"""A random two-layer llama as an edge artifact: the graph contract of the toolchain, small enough for unit tests."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclass(frozen=True)
class Sizes:
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    vocab: int = 61
    context: int = 256
    seed: int = 7

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


class _Graph:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.rng = np.random.default_rng(sizes.seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initialisers: list[onnx.TensorProto] = []
        self.count = 0

    def const(self, array: np.ndarray) -> str:
        self.count += 1
        name = f"c{self.count}"
        self.initialisers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def ints(self, *values: int) -> str:
        return self.const(np.array(values, dtype=np.int64))

    def weight(self, *shape: int, scale: float = 0.35) -> str:
        return self.const((self.rng.standard_normal(shape) * scale).astype(np.float32))

    def op(self, kind: str, *inputs: str, out: str | None = None, **attributes: object) -> str:
        self.count += 1
        name = out or f"t{self.count}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def norm(self, x: str) -> str:
        mean = self.op("ReduceMean", self.op("Mul", x, x), self.ints(-1), keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.const(np.array([1e-5], np.float32))))
        return self.op("Mul", self.op("Div", x, root), self.weight(self.sizes.hidden, scale=1.0))

    def heads(self, x: str, heads: int) -> str:
        shaped = self.op("Reshape", x, self.ints(0, 0, heads, self.sizes.head_dim))
        return self.op("Transpose", shaped, perm=[0, 2, 1, 3])

    def rope(self, x: str, cos: str, sin: str, out: str | None = None) -> str:
        half = self.sizes.head_dim // 2
        low = self.op("Slice", x, self.ints(0), self.ints(half), self.ints(3))
        high = self.op("Slice", x, self.ints(half), self.ints(2 * half), self.ints(3))
        turned = self.op("Concat", self.op("Neg", high), low, axis=3)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", turned, sin), out=out)

    def layer(self, x: str, index: int, cos: str, sin: str) -> str:
        s = self.sizes
        groups = s.heads // s.kv_heads
        inner = self.norm(x)
        query = self.rope(self.heads(self.op("MatMul", inner, self.weight(s.hidden, s.hidden)), s.heads), cos, sin)
        kv_width = s.kv_heads * s.head_dim
        new_k = self.rope(
            self.heads(self.op("MatMul", inner, self.weight(s.hidden, kv_width)), s.kv_heads),
            cos,
            sin,
            out=f"new_k.{index}",
        )
        value = self.heads(self.op("MatMul", inner, self.weight(s.hidden, kv_width)), s.kv_heads)
        new_v = self.op("Identity", value, out=f"new_v.{index}")
        keys = self.op("Unsqueeze", self.op("Concat", f"past_k.{index}", new_k, axis=2), self.ints(2))
        values = self.op("Unsqueeze", self.op("Concat", f"past_v.{index}", new_v, axis=2), self.ints(2))
        # (B, heads, S, D) → (B, kv, groups, S, D), broadcast against (B, kv, 1, T, D)
        query = self.op("Reshape", query, self.ints(0, s.kv_heads, groups, -1, s.head_dim))
        scores = self.op("MatMul", query, self.op("Transpose", keys, perm=[0, 1, 2, 4, 3]))
        scores = self.op("Mul", scores, self.const(np.array([s.head_dim**-0.5], np.float32)))
        scores = self.op("Add", scores, self.op("Unsqueeze", "attention_bias", self.ints(1)))
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), values)
        mixed = self.op("Transpose", mixed, perm=[0, 3, 1, 2, 4])
        mixed = self.op("Reshape", mixed, self.ints(0, 0, s.hidden))
        x = self.op("Add", x, self.op("MatMul", mixed, self.weight(s.hidden, s.hidden)))
        wide = self.op("MatMul", self.norm(x), self.weight(s.hidden, 2 * s.hidden))
        wide = self.op("Mul", wide, self.op("Sigmoid", wide))
        return self.op("Add", x, self.op("MatMul", wide, self.weight(2 * s.hidden, s.hidden)))


def build_model(sizes: Sizes) -> onnx.ModelProto:
    g = _Graph(sizes)
    half = np.arange(0, sizes.head_dim, 2) / sizes.head_dim
    angles = np.arange(4096)[:, None] * (10000.0**-half)[None, :]
    table = np.concatenate([angles, angles], axis=1)
    cos = g.op("Unsqueeze", g.op("Gather", g.const(np.cos(table).astype(np.float32)), "position_ids"), g.ints(1))
    sin = g.op("Unsqueeze", g.op("Gather", g.const(np.sin(table).astype(np.float32)), "position_ids"), g.ints(1))
    x = g.op("Gather", g.weight(sizes.vocab, sizes.hidden, scale=1.0), "input_ids")
    for index in range(sizes.layers):
        x = g.layer(x, index, cos, sin)
    picked = g.op("GatherND", x, g.op("Unsqueeze", "logits_at", g.ints(-1)), batch_dims=1)
    g.op("MatMul", g.norm(picked), g.weight(sizes.hidden, sizes.vocab, scale=1.0), out="logits")
    info = helper.make_tensor_value_info
    inputs = [
        info("input_ids", TensorProto.INT64, ["B", "S"]),
        info("position_ids", TensorProto.INT64, ["B", "S"]),
        info("attention_bias", TensorProto.FLOAT, ["B", 1, "S", "T"]),
        info("logits_at", TensorProto.INT64, ["B", "L"]),
    ]
    outputs = [info("logits", TensorProto.FLOAT, ["B", "L", sizes.vocab])]
    for index in range(sizes.layers):
        for kind in "kv":
            shape = ["B", sizes.kv_heads, "P", sizes.head_dim]
            inputs.append(info(f"past_{kind}.{index}", TensorProto.FLOAT, shape))
            outputs.append(info(f"new_{kind}.{index}", TensorProto.FLOAT, ["B", sizes.kv_heads, "S", sizes.head_dim]))
    graph = helper.make_graph(g.nodes, "tiny-llama", inputs, outputs, g.initialisers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def write_artifact(
    directory: Path, sizes: Sizes | None = None, prefix: tuple[int, ...] = (), settled_layer: int | None = None
) -> Path:
    """Write model.onnx, prefix.npz and manifest.json; the prefix is computed with the model itself."""
    sizes = sizes or Sizes()
    directory.mkdir(parents=True, exist_ok=True)
    model_path = directory / "model.onnx"
    model_path.write_bytes(build_model(sizes).SerializeToString())
    if prefix:
        outputs = run_plain(model_path, sizes, list(prefix))
        np.savez(
            directory / "prefix.npz",
            k=np.stack([outputs[f"new_k.{i}"][0] for i in range(sizes.layers)]),
            v=np.stack([outputs[f"new_v.{i}"][0] for i in range(sizes.layers)]),
            logits=outputs["logits"][0, -1],
        )
    files = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in sorted(directory.iterdir())
        if path.name != "manifest.json"
    }
    manifest = {
        "format": "overspill-onnx",
        "version": 1,
        "family": "tiny",
        "variant": "tiny-int8",
        "precision": "int8",
        "layers": None,
        "num_layers": sizes.layers,
        "num_kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "context_tokens": sizes.context,
        "bos_token_id": 1,
        "eos_token_ids": [2],
        "prepend_bos": False,
        "prefix_token_ids": list(prefix),
        "settled_layer": settled_layer,
        "source_sha256": "0" * 64,
        "files": files,
        "measured": {},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def run_plain(
    model_path: Path, sizes: Sizes, ids: list[int], past: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Run all of `ids` in one go; logits of every position.

    Args:
        past: what came before, by input name; None begins with nothing.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(model_path), options, providers=["CPUExecutionProvider"])
    count = len(ids)
    if past is None:
        empty = np.zeros((1, sizes.kv_heads, 0, sizes.head_dim), np.float32)
        past = {f"past_{kind}.{i}": empty for i in range(sizes.layers) for kind in "kv"}
    begun = past["past_k.0"].shape[2]
    feeds = {
        "input_ids": np.array([ids], np.int64),
        "position_ids": begun + np.arange(count, dtype=np.int64)[None],
        "attention_bias": np.triu(np.full((count, begun + count), -1e9, np.float32), begun + 1)[None, None],
        "logits_at": np.arange(count, dtype=np.int64)[None],
        **past,
    }
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))
