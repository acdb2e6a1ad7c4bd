"""The load that other servers export for Prometheus, read from the few lines that say it.

| server    | running                        | waiting                      | KV use                          |
|-----------|--------------------------------|------------------------------|---------------------------------|
| vLLM      | `vllm:num_requests_running`    | `vllm:num_requests_waiting`  | `vllm:kv_cache_usage_perc`      |
| SGLang    | `sglang:num_running_reqs`      | `sglang:num_queue_reqs`      | `sglang:token_usage`            |
| llama.cpp | `llamacpp:requests_processing` | `llamacpp:requests_deferred` | `llamacpp:kv_cache_usage_ratio` |
| TGI       | `tgi_batch_current_size`       | `tgi_queue_size`             | -                               |

Engines of one server (vLLM's data parallelism) are summed; their KV use is averaged, and the room is that of the one
that has most: a prompt has to fit one of them.
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
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MOST = 1e9

_Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, slots=True)
class ExportedLoad:
    """What a server says of its load; None where it says nothing.

    Attributes:
        kv_usage: used share of its KV cache, in [0, 1].
        kv_free_tokens: for which its KV cache has room.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    kv_free_tokens: int | None = None


def read_load(page: str) -> ExportedLoad:
    """Read a page of the Prometheus text format; what is no sample of the table above is skipped."""
    samples = read_samples(page, _WANTED)
    used = [(labels.get("engine", ""), min(1.0, share)) for labels, share in _named(samples, _KV_USE)]
    return ExportedLoad(
        running=_sum(samples, _RUNNING),
        waiting=_sum(samples, _WAITING),
        kv_usage=sum(share for _, share in used) / len(used) if used else None,
        kv_free_tokens=_most_free(_kv_tokens(samples), used),
    )


def read_samples(page: str, wanted: frozenset[str]) -> Mapping[str, Sequence[tuple[Mapping[str, str], float]]]:
    """Return the samples of some metrics: labels and a value of each; what is no count or share is left out."""
    prefixes = tuple(wanted)
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for line in page.splitlines():
        if not line.startswith(prefixes):
            continue
        found = _LINE.match(line)
        if found is None or found[1] not in wanted:
            continue
        value = _number(found[3])
        if value is not None:
            samples.setdefault(found[1], []).append((dict(_LABEL.findall(found[2] or "")), value))
    return samples


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0.0 <= value <= _MOST else None


def _named(samples: _Samples, names: Sequence[str]) -> Sequence[tuple[Mapping[str, str], float]]:
    """Return the samples under the first of the names that there are any of: releases have renamed some."""
    return next((samples[name] for name in names if name in samples), ())


def _sum(samples: _Samples, names: Sequence[str]) -> int | None:
    values = [value for _, value in _named(samples, names)]
    return round(sum(values)) if values else None


def _kv_tokens(samples: _Samples) -> dict[str, float]:
    """Return how many tokens each engine's KV cache holds: of vLLM, an info metric's labels tell its blocks."""
    found = {labels.get("engine", ""): value for labels, value in _named(samples, _KV_TOKENS)}
    for labels, _ in _named(samples, _KV_BLOCKS):
        size, count = _number(labels.get("block_size", "")), _number(labels.get("num_gpu_blocks", ""))
        if size and count:
            found[labels.get("engine", "")] = size * count
    return found


def _most_free(tokens: Mapping[str, float], used: Sequence[tuple[str, float]]) -> int | None:
    free = [tokens[engine] * (1.0 - share) for engine, share in used if engine in tokens]
    return int(max(free)) if free else None
