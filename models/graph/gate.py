"""What an INT8 graph must be before anyone may load it: the form that TensorRT fuses and that loses nothing silently.

Checked: every zero point is int8 and 0, nothing is quantized to uint8, no bias hides behind an int32
DequantizeLinear, every scale is a finite positive constant, activations are scaled per tensor, weights per output
channel, and every weight matrix is INT8.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from router.base.errors import ArtifactError

_FLOAT_BY_DESIGN = ("half_turn", "hadamard_")  # small, shared by all layers, and in front of a quantizer


@dataclass(frozen=True)
class GraphFacts:
    """Counts of one graph.

    Attributes:
        matrices: products with a weight matrix; the rotary and Hadamard constants are none.
        int8_matrices: those of them with INT8 weights and INT8 input.
        quantizers: QuantizeLinear nodes.
        float_weights_bytes: float weights that a MatMul reads; 0 in a whole INT8 graph.
    """

    nodes: int
    matrices: int
    int8_matrices: int
    quantizers: int
    float_weights_bytes: int


class _Graph:
    def __init__(self, path: Path) -> None:
        model = onnx.load(str(path), load_external_data=False)
        self.nodes = list(model.graph.node)
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.maker = {output: node for node in self.nodes for output in node.output}
        self._folder = str(path.parent)

    def value(self, name: str) -> npt.NDArray[np.float64]:
        array: npt.NDArray[np.float64] = numpy_helper.to_array(self.constants[name], self._folder)
        return array


def inspect(path: Path) -> GraphFacts:
    """Count what is quantized.

    Args:
        path: `model.onnx`, with its data file beside it.
    """
    graph = _Graph(path)
    matrices = int8 = floats = 0
    for node in graph.nodes:
        if node.op_type not in ("MatMul", "Gemm"):
            continue
        weight = _weight(graph, node.input[1])
        if weight is None or weight.name.startswith(_FLOAT_BY_DESIGN):
            continue
        matrices += 1
        source = graph.maker.get(node.input[0])
        quantized = source is not None and source.op_type == "DequantizeLinear"
        if weight.data_type == TensorProto.INT8 and quantized:
            int8 += 1
        elif weight.data_type != TensorProto.INT8:
            floats += int(np.prod(weight.dims)) * 4
    quantizers = sum(node.op_type == "QuantizeLinear" for node in graph.nodes)
    return GraphFacts(len(graph.nodes), matrices, int8, quantizers, floats)


def _weight(graph: _Graph, name: str) -> TensorProto | None:
    """The constant behind a matrix operand, through one DequantizeLinear."""
    if name in graph.constants:
        return graph.constants[name]
    node = graph.maker.get(name)
    if node is not None and node.op_type == "DequantizeLinear":
        return graph.constants.get(node.input[0])
    return None


def problems(path: Path) -> list[str]:
    """List what is wrong with an INT8 graph, one line each; empty if nothing is."""
    graph = _Graph(path)
    found: list[str] = []
    for node in graph.nodes:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            found += _problems_of(graph, node)
        elif node.op_type.endswith("Integer") or node.op_type == "DynamicQuantizeLinear":
            found.append(f"{node.name}: {node.op_type} is not Q/DQ form, TensorRT cannot fuse it")
    facts = inspect(path)
    if facts.int8_matrices < facts.matrices:
        found.append(f"only {facts.int8_matrices} of {facts.matrices} weight matrices are INT8")
    if not facts.int8_matrices:
        found.append("no matrix is INT8 at all")
    return found


def _problems_of(graph: _Graph, node: onnx.NodeProto) -> list[str]:
    found = []
    if len(node.input) < 3 or node.input[2] not in graph.constants:
        return [f"{node.name}: its zero point is not a constant, so its type is uint8 or unknown"]
    zero = graph.constants[node.input[2]]
    kind = TensorProto.DataType.Name(zero.data_type)
    if zero.data_type != TensorProto.INT8:
        found.append(f"{node.name}: quantized type is {kind}, expected INT8")
    elif np.any(graph.value(node.input[2])):
        found.append(f"{node.name}: a zero point is not 0")
    if node.input[1] not in graph.constants:
        return [*found, f"{node.name}: its scale is computed at run time"]
    scale = graph.value(node.input[1])
    if not np.all(np.isfinite(scale)) or np.any(scale <= 0):
        found.append(f"{node.name}: a scale is not finite and positive")
    constant = node.op_type == "DequantizeLinear" and node.input[0] in graph.constants
    if constant and graph.constants[node.input[0]].data_type != TensorProto.INT8:
        stored = TensorProto.DataType.Name(graph.constants[node.input[0]].data_type)
        found.append(f"{node.name}: a {stored} constant is dequantized, expected INT8")
    if constant and scale.ndim != 1:
        found.append(f"{node.name}: weights are scaled per tensor, expected per output channel")
    if not constant and scale.ndim != 0:
        found.append(f"{node.name}: activations are scaled per channel, expected per tensor")
    return found


def check_graph(path: Path) -> GraphFacts:
    """Refuse an INT8 graph that breaks a rule.

    Raises:
        ArtifactError: lists the broken rules.
    """
    found = problems(path)
    if found:
        listed = "".join(f"\n  {line}" for line in found[:20])
        raise ArtifactError(f"{path}: the INT8 graph breaks {len(found)} rules:{listed}")
    return inspect(path)
