"""W8A8 products and the rotations before them, against float32."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from cloud_tier.engine.linear import Int8Linear
from cloud_tier.engine.rotate import Rotation, hadamard, hadamard_block


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_the_product_is_close_to_float32(tokens: int, turned: bool) -> None:
    weight, bias, x = _normal(96, 72), _normal(96, seed=1), _normal(tokens, 72, seed=2)
    expected = x @ weight.T + bias
    found = Int8Linear.pack(weight, bias, turned=turned)(x)
    assert found.dtype == torch.float32
    assert ((found - expected).norm() / expected.norm()).item() < 0.015


def test_no_token_depends_on_its_company() -> None:
    product = Int8Linear.pack(_normal(64, 72))
    x = _normal(5, 72)
    together = product(x * torch.tensor([1.0, 1e3, 1e-3, 0.0, 1.0]).unsqueeze(1))
    assert torch.equal(together[:1], product(x[:1]))
    assert torch.equal(together[4:], product(x[4:]))
    assert not together[3].any()


def test_numbers_that_are_none_stay_with_their_token() -> None:
    product = Int8Linear.pack(_normal(64, 72))
    x = _normal(3, 72)
    x[1, 5] = torch.nan
    found = product(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], product(x[[0, 2]]))


def test_a_channel_that_stands_out_costs_less_when_it_is_turned() -> None:
    weight, x = _normal(96, 128), _normal(20, 128, seed=2)
    x[:, 3] *= 60
    expected = x @ weight.T
    errors = [(Int8Linear.pack(weight, turned=turned)(x) - expected).norm().item() for turned in (False, True)]
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("width", [1, 7, 64, 72, 576, 4096])
def test_a_rotation_is_orthogonal(width: int) -> None:
    rotation = Rotation(width)
    x, weight = _normal(3, width), _normal(5, width, seed=1)
    torch.testing.assert_close(rotation.rows(x) @ rotation.rows(weight).T, x @ weight.T, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(rotation.columns(weight.T), rotation.rows(weight).T)


def test_hadamard_matrices_are_their_own_inverse() -> None:
    assert [hadamard_block(width) for width in (1536, 100, 7)] == [64, 4, 1]
    torch.testing.assert_close(hadamard(16) @ hadamard(16), torch.eye(16))


@pytest.mark.process
@pytest.mark.parametrize("instructions", ["SSE41", "AVX2", "AVX512_CORE", "DEFAULT"])
def test_no_sum_saturates_on_any_cpu(instructions: str) -> None:
    """CPUs without VNNI add two products in 16 bits; `ONEDNN_MAX_CPU_ISA` makes this one of them."""
    command = """
import torch
from cloud_tier.engine.linear import Int8Linear
for sign in (1.0, -1.0):
    weight, x = sign * torch.ones(8, 64), torch.ones(3, 64)
    torch.testing.assert_close(Int8Linear.pack(weight)(x), x @ weight.T)
"""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    subprocess.run([sys.executable, "-c", command], env=env, check=True, timeout=300)
