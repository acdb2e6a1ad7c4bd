"""ONNX files with fixed dimensions, opened as a catalogue says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from models.vision.artifact import open_dimensions
from router.base.errors import ArtifactError
from router.values.tensors import Signature, TensorSpec


def model() -> Any:
    """A convolution that was exported for ten images of 4 × 4, its weights listed among the inputs as of old."""
    weights = numpy_helper.from_array(np.ones((2, 3, 1, 1), np.float32), "w")
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [10, 3, 4, 4]),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 3, 1, 1]),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [10, 2, 4, 4])
    graph = helper.make_graph([node], "g", inputs, [output], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=4)


def signature(given: TensorSpec, made: TensorSpec) -> Signature:
    return Signature((given,), (made,))


X, Y = TensorSpec("x", "FP32", (3, -1, -1)), TensorSpec("y", "FP32", (2, -1, -1))


def test_any_size_and_any_number_of_images_can_be_computed() -> None:
    opened = open_dimensions(model(), signature(X, Y), Path("there.onnx"))
    session = onnxruntime.InferenceSession(opened.SerializeToString(), providers=["CPUExecutionProvider"])
    assert [item.name for item in session.get_inputs()] == ["x"]
    for shape in ((1, 3, 4, 4), (2, 3, 6, 8)):
        [found] = session.run(None, {"x": np.ones(shape, np.float32)})
        assert found.shape == (shape[0], 2, *shape[2:])
        assert (found == 3).all()
    assert model().graph.input[0].type.tensor_type.shape.dim[0].dim_value == 10  # the source stays as it is


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (signature(TensorSpec("z", "FP32", (3, -1, -1)), Y), "inputs are x, the catalogue says z"),
        (
            signature(TensorSpec("x", "UINT8", (3, -1, -1)), Y),
            "`x` has 4 dimensions of type 1, the .* says x UINT8",
        ),
        (signature(TensorSpec("x", "FP32", (3, -1)), Y), "`x` has 4 dimensions"),
        (signature(X, TensorSpec("y", "FP32", (5, -1, -1))), "do not allow the catalogue's shapes"),
    ],
)
def test_what_the_file_does_not_allow_is_named(wrong: Signature, told: str) -> None:
    with pytest.raises(ArtifactError, match=told) as refused:
        open_dimensions(model(), wrong, Path("there.onnx"))
    assert refused.value.message.startswith("there.onnx: ")
    onnx.checker.check_model(model())
