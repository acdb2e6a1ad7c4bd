"""Triton's metrics, as a real one writes them, and as none should."""

from __future__ import annotations

import pytest

from router.upstream.servers.triton_load import TritonLoad, read_triton_load

# Of tritonserver 2.51 with two Python models, while one of them had more requests than instances.
PAGE = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="whole",version="1"} 12
nv_inference_count{model="whole",version="1"} 12
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="whole",version="1"} 0
nv_inference_pending_request_count{model="counting",version="1"} 3
nv_inference_pending_request_count{model="counting",version="2"} 1
nv_pinned_memory_pool_total_bytes 268435456
"""
# As NVIDIA documents those of TensorRT-LLM's backend.
LLM = """\
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 7
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 100
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 400
"""


def test_what_waits_is_told_for_each_model() -> None:
    assert read_triton_load(PAGE) == TritonLoad({"whole": 0, "counting": 4})


def test_an_llm_backend_tells_more() -> None:
    assert read_triton_load(LLM) == TritonLoad({}, running=5, waiting=2, kv_free_tokens=6400)


def test_an_older_one_tells_what_waits_by_the_difference() -> None:
    older = "\n".join(line for line in LLM.splitlines() if "waiting" not in line)
    assert read_triton_load(older).waiting == 2


def test_two_llm_models_have_the_room_of_the_larger_one() -> None:
    other = LLM.replace("tensorrt_llm", "small").replace("} 100", "} 10").replace("} 64", "} 32")
    assert read_triton_load(LLM + other).kv_free_tokens == 6400


def test_its_vllm_backend_tells_what_vllm_does() -> None:
    page = 'vllm:num_requests_running{model="m"} 3\nvllm:num_requests_waiting{model="m"} 1\n'
    assert read_triton_load(page) == TritonLoad({}, running=3, waiting=1)


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "1e30", "many"])
def test_what_cannot_be_is_not_there(value: str) -> None:
    page = f'nv_inference_pending_request_count{{model="m"}} {value}\nnv_inference_pending_request_count{{model="n'
    assert read_triton_load(page) == TritonLoad({})
