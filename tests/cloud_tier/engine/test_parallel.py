"""Tensor parallel over real processes equals one rank, evenly split or not."""

from __future__ import annotations

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cloud_tier.engine.mesh import Mesh
from cloud_tier.engine.sharding import shard, split
from router.base.errors import ConfigError
from tests.support import engine_models
from tests.support.engine_models import prompt, small
from tests.support.engine_parallel import lives, on_one, on_ranks


@pytest.mark.process
@pytest.mark.parametrize(("name", "ranks", "mesh"), [("qwen2", 2, False), ("llama3-tied", 3, True)])
def test_logits_equal_one_rank(name: str, ranks: int, mesh: bool, tmp_path: Path) -> None:
    weights = engine_models.save(name, tmp_path)
    steps = lives(prompt(40), prompt(20, 1))
    config = small(weights, tensor_parallel=ranks)
    assert (on_ranks(config, steps, tmp_path, mesh=mesh) - on_one(config, steps)).abs().max() <= 1e-4


@pytest.mark.process
def test_int8_on_two_ranks_is_close_to_float32_on_one(tmp_path: Path) -> None:
    weights = engine_models.save("qwen2", tmp_path)
    steps = lives(prompt(40), prompt(20, 1))
    found = on_ranks(small(weights, tensor_parallel=2, dtype="int8"), steps, tmp_path, mesh=True)
    assert torch.nn.functional.cosine_similarity(found, on_one(small(weights), steps), dim=-1).min() > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mesh_sums_and_gathers_like_one(ranks: int, dtype: torch.dtype) -> None:
    pairs = {low_high: socket.socketpair() for low_high in itertools.combinations(range(ranks), 2)}
    ends: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for (low, high), (first, second) in pairs.items():
        ends[low][high], ends[high][low] = first, second
    meshes = [Mesh(rank, ends[rank]) for rank in range(ranks)]
    parts = [torch.randn(28, 576, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(ranks)]
    widths = [part.shape[1] - rank for rank, part in enumerate(parts)]
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(Mesh.join, meshes))
        sums = list(pool.map(lambda rank: meshes[rank].sum(parts[rank]), range(ranks)))
        joined = list(
            pool.map(lambda rank: meshes[rank].gather_last(parts[rank][:, : widths[rank]], widths), range(ranks))
        )
    assert all(torch.equal(one, sums[0]) for one in sums)
    assert torch.equal(sums[0], sum(parts[1:], start=parts[0]))
    assert joined[1:] == [None] * (ranks - 1)
    assert joined[0] is not None
    assert torch.equal(joined[0], torch.cat([p[:, :width] for p, width in zip(parts, widths, strict=True)], dim=-1))
    for first, second in pairs.values():
        first.close()
        second.close()


def test_a_mesh_whose_sockets_hold_too_little_says_so_instead_of_hanging() -> None:
    first, second = socket.socketpair()
    with first, second:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with pytest.raises(ConfigError, match=r"sysctl -w net\.core\.wmem_max"):
            Mesh(0, {1: first}).join()


def test_smollm2_on_two_ranks_is_six_and_three_query_heads() -> None:
    parts = [shard(rank, 2, heads=(9, 3), intermediate=1536, vocab=49152) for rank in range(2)]
    assert [part.query_heads.size for part in parts] == [6, 3]
    assert [part.kv_heads.size for part in parts] == [2, 1]


@pytest.mark.parametrize(("total", "parts"), [(49152, 5), (7, 7), (301, 3), (100, 1)])
def test_a_split_covers_everything_once(total: int, parts: int) -> None:
    spans = [split(total, parts, index) for index in range(parts)]
    assert [index for span in spans for index in range(span.start, span.end)] == list(range(total))
    assert max(span.size for span in spans) == spans[0].size
    assert spans[0].size - spans[-1].size <= 1


def test_more_ranks_than_kv_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel = 4, but the model has 3 KV heads"):
        shard(0, 4, heads=(9, 3), intermediate=1536, vocab=49152)
