"""The benchmark for machines with a GPU, as far as it runs without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpu", *arguments])
    return gpu.main()


def test_an_8b_model_on_a_terabyte_a_second_is_bound_to_67_tokens() -> None:
    config = gpu.SHAPES["llama-3-8b"]
    assert gpu.roofline(config, 1, 0, 1e12) == pytest.approx(1e12 / 2 / 7.504e9, rel=0.001)
    per_token_bytes = 2 * 32 * 8 * 128 * 2
    read = 2 * 7.504e9 + 64 * 1000 * per_token_bytes
    assert gpu.roofline(config, 64, 1000, 1e12) == pytest.approx(64 * 1e12 / read, rel=0.001)


def test_random_weights_have_the_sizes_of_the_shape() -> None:
    config = gpu.SHAPES["tiny"]
    weights = gpu._Random(config)
    for name, sizes in (
        ("model.embed_tokens.weight", (1024, 128)),
        ("lm_head.weight", (1024, 128)),
        ("model.layers.0.self_attn.k_proj.weight", (64, 128)),
        ("model.layers.0.mlp.down_proj.weight", (128, 256)),
        ("model.layers.0.input_layernorm.weight", (128,)),
    ):
        assert weights.read(name).shape == sizes


@pytest.mark.process
def test_the_same_code_decodes_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, out = torch.get_num_threads(), tmp_path / "gpu.json"
    options = ("--device", "cpu", "--shape", "tiny", "--context", "32", "--steps", "8", "--batches", "1", "3")
    try:
        assert run(monkeypatch, *options, "--only", "decode", "--json", str(out)) == 0
    finally:
        torch.set_num_threads(threads)
    told = json.loads(out.read_text())
    assert [row["batch"] for row in told["rows"]] == [1, 3]
    assert all(row["engine"] > 0 and row["transformers"] > 0 and row["roofline"] > 0 for row in told["rows"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err
