"""What a model takes and returns, from what three kinds of Triton backends and other servers say of themselves."""

from __future__ import annotations

import msgspec
import pytest

from router.upstream.codec.kserve_model import Metadata, TextModel, TritonConfig, text_model
from router.upstream.settings import KServeSettings
from router.values.feature import Feature

ALWAYS_LACKING = {
    Feature.PROMPT_IDS,
    Feature.CONTINUED_IDS,
    Feature.STOP_IDS,
    Feature.LOGIT_BIAS,
    Feature.ALLOWED_IDS,
    Feature.LOGPROBS,
    Feature.PROMPT_LOGPROBS,
    Feature.JSON_SCHEMA,
    Feature.REGEX,
    Feature.CHOICE,
    Feature.LARK,
    Feature.GBNF,
    Feature.CONTINUED_CONSTRAINT,
    Feature.TOOLS,
    Feature.CONTINUED_TOOLS,
}


def metadata(inputs: str, outputs: str = "text_output:BYTES") -> Metadata:
    def specs(text: str) -> list[dict[str, object]]:
        named = (item.partition(":") for item in text.split())
        return [{"name": name, "datatype": datatype or "BYTES", "shape": [-1, 1]} for name, _, datatype in named]

    return msgspec.convert({"inputs": specs(inputs), "outputs": specs(outputs)}, Metadata)


def config(**given: object) -> TritonConfig:
    return msgspec.convert(given, TritonConfig)


def model(inputs: str, told: TritonConfig | None = None, *, streams: bool = False, **settings) -> TextModel | None:
    return text_model("m", metadata(inputs), told, KServeSettings(**settings), streams=streams)


VLLM = "text_input image stream:BOOL sampling_parameters exclude_input_in_output:BOOL return_finish_reason:BOOL"
TRT_LLM = (
    "text_input max_tokens:INT32 bad_words stop_words end_id:INT32 top_k:INT32 top_p:FP32 temperature:FP32 "
    "repetition_penalty:FP32 presence_penalty:FP32 frequency_penalty:FP32 random_seed:UINT64 "
    "beam_width:INT32 stream:BOOL"
)


def test_a_vllm_backend_takes_everything_as_json() -> None:
    found = model(VLLM, config(backend="vllm", model_transaction_policy={"decoupled": True}), streams=True)
    assert found is not None
    assert found.sampling_json
    assert found.endpoint == "generate_stream"
    assert found.lacks == ALWAYS_LACKING
    assert found.slots is None  # it batches by itself


def test_tensorrt_llm_takes_tensors_of_its_own_names() -> None:
    found = model(TRT_LLM, config(max_batch_size=16, ensemble_scheduling={"step": []}), streams=True)
    assert found is not None
    assert found.spelling["seed"] == "random_seed"
    assert found.spelling["stop"] == "stop_words"
    assert found.greedy_by_top_k
    assert found.slots == 16
    assert found.lacks == {*ALWAYS_LACKING, Feature.IGNORE_EOS, Feature.MIN_P, Feature.MIN_TOKENS}


def test_any_other_model_is_told_what_every_model_may_be_told() -> None:
    found = model("text_input", config(backend="python"))
    assert found is not None
    assert found.spelling == {name: name for name in ("max_tokens", "temperature", "top_p")}
    assert found.endpoint == "generate"
    assert {Feature.TOP_K, Feature.SEED, Feature.PENALTIES, Feature.REPETITION_PENALTY} <= found.lacks


def test_the_settings_say_what_no_metadata_does() -> None:
    found = model("text_input", None, spelling={"top_k": "k", "temperature": ""}, endpoint="generate")
    assert found is not None
    assert found.spelling == {"max_tokens": "max_tokens", "top_p": "top_p", "top_k": "k"}
    assert Feature.TOP_K not in found.lacks
    assert found.endpoint == "generate"


def test_a_server_that_is_no_triton_is_asked_over_infer() -> None:
    assert model("text_input").endpoint == "infer"


@pytest.mark.parametrize(
    ("inputs", "outputs"), [("x:FP32", "y:FP32"), ("text_input", "y"), ("text_input:FP32", "text_output")]
)
def test_a_model_without_text_in_and_out_is_none(inputs: str, outputs: str) -> None:
    assert text_model("m", metadata(inputs, outputs), None, KServeSettings(), streams=False) is None


def test_names_of_the_tensors_are_configurable() -> None:
    assert text_model(
        "m",
        metadata("INPUT_0", "OUTPUT_0"),
        None,
        KServeSettings(text_input="INPUT_0", text_output="OUTPUT_0"),
        streams=False,
    )


def test_a_server_that_tells_of_no_tensors_is_believed_to_have_them() -> None:
    assert text_model("m", Metadata(), None, KServeSettings(), streams=False) is not None


@pytest.mark.parametrize(
    ("told", "slots"),
    [
        ({"backend": "python", "instance_group": [{"count": 2}]}, 2),
        ({"backend": "python", "max_batch_size": 4, "instance_group": [{"count": 2}]}, 8),
        ({"backend": "onnxruntime", "max_batch_size": 8, "instance_group": [{"count": 1, "gpus": [0, 1]}]}, 16),
        ({"backend": "python"}, 1),
        ({"backend": "vllm", "instance_group": [{"count": 1}]}, None),
        ({"ensemble_scheduling": {"step": [{"model_name": "a"}]}}, None),
    ],
)
def test_instances_and_batches_are_slots(told: dict[str, object], slots: int | None) -> None:
    assert config(**told).slots == slots


@pytest.mark.parametrize(
    ("text", "window"), [("2048", 2048), ("0", None), ("-3", None), ("many", None), ("9" * 30, None), ("²", None)]
)
def test_a_window_is_read_where_the_configuration_notes_one(text: str, window: int | None) -> None:
    assert config(parameters={"max_model_len": {"string_value": text}}).context_tokens == window
    assert config(parameters={"other": {"string_value": text}}).context_tokens is None
