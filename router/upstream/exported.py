"""The load that other servers export for Prometheus, read from the few lines that say it.

| server    | running                        | waiting                      | KV use                          |
|-----------|--------------------------------|------------------------------|---------------------------------|
| vLLM      | `vllm:num_requests_running`    | `vllm:num_requests_waiting`  | `vllm:kv_cache_usage_perc`      |
| SGLang    | `sglang:num_running_reqs`      | `sglang:num_queue_reqs`      | `sglang:token_usage`            |
| llama.cpp | `llamacpp:requests_processing` | `llamacpp:requests_deferred` | `llamacpp:kv_cache_usage_ratio` |
| TGI       | `tgi_batch_current_size`       | `tgi_queue_size`             | -                               |

Engines of one server (vLLM's data parallelism) are summed; their KV use is averaged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "tgi_batch_current_size",
)
_WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
    "tgi_queue_size",
)
_KV_USE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_KV_TOKENS = ("sglang:max_total_num_tokens",)
_KV_BLOCKS = ("vllm:cache_config_info",)
_WANTED = frozenset({*_RUNNING, *_WAITING, *_KV_USE, *_KV_TOKENS, *_KV_BLOCKS})
_PREFIXES = ("vllm:", "sglang:", "llamacpp:", "tgi_")
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MOST = 1e9

_Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, slots=True)
class ExportedLoad:
    """What a server says of its load; None where it says nothing.

    Attributes:
        kv_usage: used share of its KV cache, in [0, 1].
        kv_tokens: tokens that its KV cache holds when full.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    kv_tokens: int | None = None

    @property
    def kv_free_tokens(self) -> int | None:
        if self.kv_tokens is None or self.kv_usage is None:
            return None
        return int(self.kv_tokens * (1.0 - self.kv_usage))


def read_load(page: str) -> ExportedLoad:
    """Read a page of the Prometheus text format; what is no sample of the table above is skipped."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for line in page.splitlines():
        if not line.startswith(_PREFIXES):
            continue
        found = _LINE.match(line)
        if found is None or found[1] not in _WANTED:
            continue
        value = _number(found[3])
        if value is not None:
            samples.setdefault(found[1], []).append((dict(_LABEL.findall(found[2] or "")), value))
    usage = _values(samples, _KV_USE)
    return ExportedLoad(
        running=_sum(samples, _RUNNING),
        waiting=_sum(samples, _WAITING),
        kv_usage=min(1.0, sum(usage) / len(usage)) if usage else None,
        kv_tokens=_blocks(samples) or _sum(samples, _KV_TOKENS),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0.0 <= value <= _MOST else None


def _values(samples: _Samples, names: Sequence[str]) -> list[float]:
    return next(([value for _, value in samples[name]] for name in names if name in samples), [])


def _sum(samples: _Samples, names: Sequence[str]) -> int | None:
    values = _values(samples, names)
    return round(sum(values)) if values else None


def _blocks(samples: _Samples) -> int | None:
    """Count the tokens of vLLM's KV blocks: the labels of an info metric hold their size and number."""
    total = 0
    for name in _KV_BLOCKS:
        for labels, _ in samples.get(name, ()):
            size, count = _number(labels.get("block_size", "")), _number(labels.get("num_gpu_blocks", ""))
            total += round((size or 0.0) * (count or 0.0))
    return total or None
