"""Pages of metrics as vLLM 0.32, llama.cpp, SGLang and TGI write them, and as nobody should."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.upstream.servers.exported_load import ExportedLoad, read_load
from tests.support.foreign_server import LLAMA_METRICS, SGLANG_METRICS, TGI_METRICS, VLLM_METRICS


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (VLLM_METRICS, ExportedLoad(3, 1, 0.25, 34_944)),
        (LLAMA_METRICS, ExportedLoad(2, 5)),
        (SGLANG_METRICS, ExportedLoad(7, 2, 0.5, 500)),
        (TGI_METRICS, ExportedLoad(9, 4)),
        ("", ExportedLoad()),
        ("<html>not found</html>", ExportedLoad()),
        (VLLM_METRICS.replace("\n", "\r\n"), ExportedLoad(3, 1, 0.25, 34_944)),
    ],
)
def test_the_load_of_each_maker_is_read(page: str, load: ExportedLoad) -> None:
    assert read_load(page) == load


def test_engines_of_one_server_are_summed_and_the_room_is_that_of_the_emptiest() -> None:
    second = VLLM_METRICS.replace('engine="0"', 'engine="1"').replace(" 0.25", " 0.75")
    assert read_load(VLLM_METRICS + second) == ExportedLoad(6, 2, 0.5, 34_944)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300", "1e10", "nought", "0x10", ""])
def test_a_figure_that_cannot_be_is_none(value: str) -> None:
    page = f'vllm:num_requests_running{{engine="0"}} {value}\nvllm:kv_cache_usage_perc {value}\n'
    assert read_load(page) == ExportedLoad()


def test_a_share_above_one_is_full() -> None:
    assert read_load(VLLM_METRICS.replace(" 0.25", " 7.5")).kv_free_tokens == 0


@pytest.mark.parametrize(
    "labels",
    ['block_size="None",num_gpu_blocks="364"', 'block_size="16"', 'num_gpu_blocks="NaN",block_size="16"', "}}{{", ""],
)
def test_room_is_unknown_where_the_size_of_the_cache_is(labels: str) -> None:
    page = f'vllm:kv_cache_usage_perc{{engine="0"}} 0.5\nvllm:cache_config_info{{{labels},engine="0"}} 1.0\n'
    assert read_load(page).kv_free_tokens is None


@given(st.text(alphabet=st.sampled_from('vllm:_{}",= \\\n0123456789.eNa#sgtirunqwp'), max_size=400))
def test_no_page_breaks_it(page: str) -> None:
    for text in (page, "vllm:num_requests_running" + page, VLLM_METRICS + "vllm:kv_cache_usage_perc{" + page):
        load = read_load(text)
        assert load.running is None or load.running >= 0
        assert load.kv_usage is None or (0.0 <= load.kv_usage <= 1.0 and math.isfinite(load.kv_usage))
        assert load.kv_free_tokens is None or load.kv_free_tokens >= 0


def test_a_line_of_a_megabyte_is_read_as_quickly_as_it_is_long() -> None:
    page = "vllm:num_requests_running{" + "}" * 500_000 + '"\\' * 200_000 + " 1.0\n" + VLLM_METRICS
    assert read_load(page).waiting == 1
