"""What is refused before it can reach the engine's processes, where it could only crash them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import msgspec

from cloud_tier.engine.protocol import EngineConfig, EngineInfo, EngineRequest
from cloud_tier.engine.sharding import shard
from models.formats.weights import open_weights
from router.base.errors import ContextTooLong, InvalidRequest
from router.values.sampling import SamplingParams
from router.values.token_rules import check_token_rules

_INT64 = range(-(2**63), 2**63)


def check_model(config: EngineConfig) -> None:
    """Check the model's shape before any process is started.

    Raises:
        ArtifactError: there is no such model, or not those layers of it.
        ConfigError: it cannot be split over so many ranks.
    """
    model = open_weights(Path(config.weights), config.layers).config
    shard(
        0,
        config.tensor_parallel,
        heads=(model.num_heads, model.num_kv_heads),
        intermediate=model.intermediate_size,
        vocab=model.vocab_size,
    )


def checked_request(request: EngineRequest, info: EngineInfo) -> EngineRequest:
    """Return the request as the engine process takes it: bounds cut to the window and the vocabulary.

    Raises:
        InvalidRequest, ContextTooLong: see `Engine.generate`.
    """
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
    if request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {request.max_tokens}; ask for at least one token", param="max_tokens")
    if len(request.prompt_ids) >= info.context_tokens:
        raise ContextTooLong.of(
            info.context_tokens,
            f"the prompt has {len(request.prompt_ids)} tokens, which leave no room for an answer",
            param="prompt",
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= info.vocab_size:
        raise InvalidRequest(
            f"the prompt holds token ids outside of 0 … {info.vocab_size - 1}; use this model's tokenizer",
            param="prompt",
        )
    _check_sampling(request.sampling)
    check_token_rules(request.sampling, info.vocab_size, request.eos_ids)
    for name, number in (("priority", request.priority), ("seed", request.sampling.seed or 0)):
        if number not in _INT64:
            raise InvalidRequest(f"{name} = {number} does not fit 64 bits; choose a smaller number", param=name)
    sampling = msgspec.structs.replace(
        request.sampling, max_tokens=None, stop=(), top_k=min(request.sampling.top_k, info.vocab_size)
    )
    room = info.context_tokens - len(request.prompt_ids)
    return dataclasses.replace(request, sampling=sampling, max_tokens=min(request.max_tokens, room))


def _check_sampling(params: SamplingParams) -> None:
    allowed = {
        "temperature": (params.temperature, 0 <= params.temperature < math.inf, "a number of at least 0"),
        "top_p": (params.top_p, 0 < params.top_p <= 1, "a number in (0, 1]"),
        "top_k": (params.top_k, params.top_k >= 0, "at least 0 (0 keeps all)"),
        "repetition_penalty": (
            params.repetition_penalty,
            0 < params.repetition_penalty < math.inf,
            "a number above 0 (1 is off)",
        ),
        "min_p": (params.min_p, 0 <= params.min_p <= 1, "a number in [0, 1]"),
        "presence_penalty": (params.presence_penalty, math.isfinite(params.presence_penalty), "a finite number"),
        "frequency_penalty": (params.frequency_penalty, math.isfinite(params.frequency_penalty), "a finite number"),
    }
    for name, (value, is_allowed, rule) in allowed.items():
        if not is_allowed:
            raise InvalidRequest(f"{name} is {value}; it must be {rule}", param=name)
