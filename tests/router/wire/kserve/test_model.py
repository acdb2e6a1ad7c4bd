"""Metadata and configuration of a model name the same tensors: perf_analyzer looks each up in both."""

from __future__ import annotations

from typing import Any

import pytest

from router.values.task import Task
from router.values.tensors import Signature, TensorSpec
from router.wire.kserve.model import model_config, model_metadata
from tests.support.gateway_fakes import replica_info

SIGNATURE = Signature((TensorSpec("image", "UINT8", (-1, 3)),), (TensorSpec("score", "FP32", ()),))
KINDS: list[dict[str, Any]] = [
    {},
    {"tasks": frozenset({Task.EMBED})},
    {"signature": SIGNATURE, "tasks": frozenset({Task.INFER})},
]


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_and_configuration_name_the_same_tensors(kind: dict[str, Any]) -> None:
    replicas = [replica_info(**kind)]
    metadata, config = model_metadata("m", replicas), model_config("m", replicas, 4)
    for many, one in (("inputs", "input"), ("outputs", "output")):
        told = [(each["name"], each["datatype"].replace("BYTES", "STRING")) for each in metadata[many]]
        assert [(each["name"], each["data_type"].removeprefix("TYPE_")) for each in config[one]] == told


def test_an_encoder_gives_one_vector_a_text() -> None:
    config = model_config("m", [replica_info(tasks=frozenset({Task.EMBED}))], 4)
    assert config["input"] == [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}]
    assert config["output"][0] == {"name": "embedding", "data_type": "TYPE_FP32", "dims": [-1]}
    assert config["model_transaction_policy"] == {"decoupled": False}


def test_a_pipelines_batch_is_no_dimension_of_its_configuration() -> None:
    config = model_config("m", [replica_info(signature=SIGNATURE)], 4)
    assert (config["input"][0]["dims"], config["output"][0]["dims"]) == ([-1, 3], [])
