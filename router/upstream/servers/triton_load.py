"""The load that Triton exports for Prometheus: for each model what waits for an instance, for an LLM backend more.

| metric                                                          | what it counts                                |
|-----------------------------------------------------------------|-----------------------------------------------|
| `nv_inference_pending_request_count{model}`                     | requests of a model that wait for an instance |
| `nv_trt_llm_request_metrics{request_type="scheduled"}`          | TensorRT-LLM: requests that run               |
| `nv_trt_llm_request_metrics{request_type="waiting"}`            | TensorRT-LLM: requests that wait              |
| `nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free"}` | TensorRT-LLM: blocks; `tokens_per`: their size |
| `vllm:num_requests_running` and others                          | its vLLM backend, as vLLM itself: exported.py |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.upstream.servers.exported_load import ExportedLoad, read_load, read_samples

_PENDING = "nv_inference_pending_request_count"
_REQUESTS = "nv_trt_llm_request_metrics"
_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
_WANTED = frozenset({_PENDING, _REQUESTS, _BLOCKS})


@dataclass(frozen=True, slots=True)
class TritonLoad:
    """What a Triton says of its load.

    Attributes:
        pending: model → requests that wait there, those of this tier included.
        running, waiting: of its LLM backend, over all models; None where it has none or that does not tell.
        kv_free_tokens: room in that backend's KV cache.
    """

    pending: Mapping[str, int]
    running: int | None = None
    waiting: int | None = None
    kv_free_tokens: int | None = None


def read_triton_load(page: str) -> TritonLoad:
    """Read a page of the Prometheus text format; what cannot be read is not there."""
    samples = read_samples(page, _WANTED)
    pending: dict[str, int] = {}
    for labels, value in samples.get(_PENDING, ()):
        model = labels.get("model", "")
        pending[model] = pending.get(model, 0) + round(value)
    requests, blocks = samples.get(_REQUESTS, ()), samples.get(_BLOCKS, ())
    vllm: ExportedLoad = read_load(page)
    running = _labelled(requests, "request_type", "scheduled")
    waiting = _labelled(requests, "request_type", "waiting")
    if running is not None and waiting is None:  # releases before it was a figure of its own
        active = _labelled(requests, "request_type", "active")
        waiting = None if active is None else max(0, active - running)
    free_tokens = _free_tokens(blocks)
    return TritonLoad(
        pending=pending,
        running=vllm.running if running is None else running,
        waiting=vllm.waiting if waiting is None else waiting,
        kv_free_tokens=vllm.kv_free_tokens if free_tokens is None else free_tokens,
    )


def _labelled(samples: Sequence[tuple[Mapping[str, str], float]], label: str, wanted: str) -> int | None:
    values = [value for labels, value in samples if labels.get(label) == wanted]
    return round(sum(values)) if values else None


def _free_tokens(blocks: Sequence[tuple[Mapping[str, str], float]]) -> int | None:
    """Return the room of the model that has the most: a prompt has to fit into one of them."""
    free: dict[str, int] = {}
    for labels, value in blocks:
        if labels.get("kv_cache_block_type") == "free":
            model = labels.get("model", "")
            own = [(other, size) for other, size in blocks if other.get("model", "") == model]
            free[model] = round(value) * (_labelled(own, "kv_cache_block_type", "tokens_per") or 0)
    return max(free.values()) if free else None
