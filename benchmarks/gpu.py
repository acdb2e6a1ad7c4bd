"""On a machine with an NVIDIA GPU: the embedded engine against the memory, and every path through CUDA.

`make bench-gpu`, or:

    python -m benchmarks gpu -- [--shape llama-3-8b] [--batches 1 16 64] [--context 512] [--steps 64]
        [--device cuda] [--only decode|checks]

1. Decoding of a model of that shape with random weights, in bfloat16: tokens a second of the engine (scheduler and
   sampler with it) and of transformers, in one run, beside the roofline: a step cannot be faster than its weights and
   the keys and values of its sequences are read, at the bandwidth that a large copy reaches here.
2. `live.gpu_checks`: the engine's own check on the GPU (NCCL with it where there are two), the tests of CUDA calls, and
   an INT8 TensorRT engine of SmolLM2 executed and compared with ONNX Runtime on the CPU.

Exits with 1 where a check fails. `--device cpu --shape tiny` runs the same code where there is no GPU; its figures say
nothing.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks._stamp import commit, machine
from benchmarks.live.gpu_checks import Checked, checks
from cloud_tier.engine.core import EngineCore
from cloud_tier.engine.model import Model
from cloud_tier.engine.parallel import Group
from cloud_tier.engine.protocol import EngineConfig, EngineRequest
from models.formats.config import ModelConfig
from models.formats.weights import Weights
from router.base.clock import MonotonicClock
from router.base.host import usable_cores
from router.values.sampling import SamplingParams

BLOCK_TOKENS = 16
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
NUMBER_BYTES = 2  # bfloat16


def shape(*sizes: int) -> ModelConfig:
    vocab, hidden, intermediate, layers, heads, kv_heads = sizes
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=None,
        max_context_tokens=8192,
        tie_embeddings=False,
        attention_bias=False,
        qk_norm=False,
        bos_token_id=None,
        eos_token_ids=(),
        model_type="llama",
    )


SHAPES = {
    "llama-3-8b": shape(128_256, 4096, 14_336, 32, 32, 8),
    "llama-3-1b": shape(128_256, 2048, 8192, 16, 32, 8),
    "tiny": shape(1024, 128, 256, 2, 4, 2),
}


@dataclass(frozen=True)
class Row:
    """Tokens a second of so many sequences together, after a prompt of the context each.

    Attributes:
        roofline: what the memory allows; share: the engine's part of that.
    """

    batch: int
    engine: float
    transformers: float
    roofline: float
    share: float


class _Random:
    """Weights cut out of one block of random numbers: drawing billions would take minutes."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._block = np.random.default_rng(1).normal(0.0, 0.02, 1 << 22).astype(np.float32)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        if "norm" in name:
            return np.ones(self._config.hidden_size, np.float32)
        return np.resize(self._block, self._sizes(name))

    def _sizes(self, name: str) -> tuple[int, int]:
        config = self._config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, between = config.hidden_size, config.intermediate_size
        sizes = {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (between, hidden),
            "up_proj": (between, hidden),
            "down_proj": (hidden, between),
        }
        return next((size for part, size in sizes.items() if part in name), (config.vocab_size, hidden))


def bandwidth(device: str) -> float:
    """Bytes a second that a large copy reads and writes: the best of five medians."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def once() -> float:
        began_s = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        _wait(device)
        return 8 * source.numel() / (time.perf_counter() - began_s)

    once()
    return max(statistics.median(once() for _ in range(5)) for _ in range(5))


def roofline(config: ModelConfig, batch: int, context: int, bytes_per_s: float) -> float:
    """Tokens a second where a step does nothing but read its weights, and the keys and values behind each token."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    per_layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    weights = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context * batch
    return batch * bytes_per_s / (NUMBER_BYTES * (weights + cached))


def of_engine(config: ModelConfig, wanted: argparse.Namespace) -> dict[int, float]:
    """Decode with the engine's own scheduler, model and sampler."""
    length = wanted.context + wanted.steps + 2 * BLOCK_TOKENS
    engine = EngineConfig(
        weights="random",
        dtype="bfloat16",
        device=wanted.device,
        max_running=max(wanted.batches),
        token_budget=max(wanted.context, 2 * max(wanted.batches)),
        kv_cache_tokens=-(-length // BLOCK_TOKENS) * BLOCK_TOKENS * (max(wanted.batches) + 1),
        threads=(usable_cores(),),
        prefix_caching=False,
    )
    weights = Weights(config, Path("random"), tuple(range(config.num_layers)), _Random(config))
    model = Model(weights, engine, Group(), length)
    core = EngineCore(engine, model.run, vocab_size=config.vocab_size, context_tokens=length, clock=MonotonicClock())
    core.probe()
    found = {}
    for batch in wanted.batches:
        chance = np.random.default_rng(batch)
        for handle in range(batch):
            prompt = tuple(chance.integers(config.vocab_size, size=wanted.context).tolist())
            core.add(batch * 1000 + handle, EngineRequest("b", prompt, SamplingParams(temperature=0), wanted.steps))
        while core.load().queued_prefill_tokens:
            core.step()
        found[batch] = _rate(batch, wanted, core.step)
        while core.busy:
            core.step()
    return found


def of_transformers(config: ModelConfig, wanted: argparse.Namespace) -> dict[int, float]:
    """Decode with Hugging Face's model and its dynamic cache."""
    told = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_context_tokens,
    )
    with torch.device(wanted.device):
        model = cast("Any", transformers.LlamaForCausalLM)._from_config(told, dtype=torch.bfloat16).eval()  # noqa: SLF001
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # its earlier name
    found = {}
    for batch in wanted.batches:
        ids = torch.randint(config.vocab_size, (batch, wanted.context), device=wanted.device)
        with torch.inference_mode():
            state = model(input_ids=ids, use_cache=True, logits_to_keep=1)

            def step(held: list[Any] = [state]) -> None:  # noqa: B006 - what the last step left
                (last,) = held
                newest = last.logits[:, -1].argmax(-1, keepdim=True)
                held[0] = model(input_ids=newest, use_cache=True, logits_to_keep=1, **{cache: last[cache]})
                held[0].logits[:, -1].argmax(-1).tolist()  # as a server has to know them

            found[batch] = _rate(batch, wanted, step)
        del state, step
    return found


def _rate(batch: int, wanted: argparse.Namespace, step: Callable[[], object]) -> float:
    """Tokens a second from the median step; the first few are warm-up, the last one ends sequences."""
    took = []
    for _ in range(wanted.steps - 2):
        began_s = time.perf_counter()
        step()
        _wait(wanted.device)
        took.append(time.perf_counter() - began_s)
    return batch / statistics.median(took[len(took) // 4 :])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def decode(wanted: argparse.Namespace) -> tuple[float, list[Row]]:
    config = SHAPES[wanted.shape]
    bytes_per_s = bandwidth(wanted.device)
    own = of_engine(config, wanted)
    gc.collect()
    if wanted.device == "cuda":
        torch.cuda.empty_cache()
    others = of_transformers(config, wanted)
    rows = []
    for batch in wanted.batches:
        bound = roofline(config, batch, wanted.context + wanted.steps // 2, bytes_per_s)
        rows.append(Row(batch, round(own[batch], 1), round(others[batch], 1), round(bound, 1), own[batch] / bound))
    return bytes_per_s, rows


def show(wanted: argparse.Namespace, rows: Sequence[Row], checked: Sequence[Checked]) -> None:
    console = Console()
    title = f"{wanted.shape}, bfloat16, behind {wanted.context} tokens: tokens a second"
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for name in ("sequences", "engine", "transformers", "roofline", "share"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (row.engine, row.transformers, row.roofline)
        table.add_row(str(row.batch), *(f"{figure:,.0f}" for figure in figures), f"{row.share:.0%}")
    if rows:
        console.print(table)
    for check in checked:
        console.print(f"{'passed' if check.passed else 'FAILED'}: {check.name}: {check.said}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=("decode", "checks"))
    wanted = parser.parse_args()
    if wanted.device == "cuda" and not torch.cuda.is_available():
        print(
            "torch finds no GPU here: run this where `nvidia-smi` shows one, with a CUDA build of torch; "
            "`--device cpu --shape tiny` tries the code itself",
            file=sys.stderr,
        )
        return 2
    gpu = torch.cuda.get_device_name() if wanted.device == "cuda" else "none"
    bytes_per_s, rows = (0.0, []) if wanted.only == "checks" else decode(wanted)
    checked = [] if wanted.only == "decode" else checks(wanted.device)
    show(wanted, rows, checked)
    if wanted.json:
        told = {
            "measured": datetime.now(timezone.utc).date().isoformat(),
            "machine": {**machine(), "gpu": gpu},
            "commit": commit(),
            "shape": wanted.shape,
            "context_tokens": wanted.context,
            "bandwidth_gb_per_s": round(bytes_per_s / 1e9, 1),
            "rows": [asdict(row) for row in rows],
            "checks": [asdict(check) for check in checked],
        }
        wanted.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if all(check.passed for check in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
