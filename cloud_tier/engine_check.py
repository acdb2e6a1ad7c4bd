"""Run the configured engines for a few seconds, and compare what they say with float32 on one CPU.

The check that tells the owner of a GPU that the engine really computes there, and computes the same: it fails when a
rank is on another device than the configuration says, and when the engine chooses tokens that the reference rates
clearly lower than its own choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from cloud_tier.engine.messages import Segment, Setup
from cloud_tier.engine.protocol import Engine, EngineConfig, EngineInfo, EngineRequest
from cloud_tier.lineup import EngineSpec
from router.base.clock import Clock
from router.base.errors import ArtifactError, ConfigError
from router.base.host import usable_cores
from router.values.sampling import SamplingParams

_TEXTS = (
    "The capital of France is",
    "One, two, three, four,",
    "Water boils at a temperature of",
    "The harbour town woke slowly, and the fishermen counted their nets. " * 8 + "Then",
)
_ANSWER_TOKENS = 24
# How much lower than its own choice the reference may rate the engine's, in logits: rounding decides near ties.
_MOST_GAP = {"float32": 0.01, "bfloat16": 0.5, "float16": 0.25, "int8": 1.0}


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine did.

    Attributes:
        devices: of its ranks, as torch says it.
        tokens_per_s: of all answers together, prompts included in the time.
        gap: the most by which the reference rates a chosen token lower than its own choice, in logits; None where this
            machine lacks the memory for the reference.
    """

    engine: str
    devices: tuple[str, ...]
    tokens: int
    tokens_per_s: float
    gap: float | None


async def check_engines(
    specs: Sequence[EngineSpec], make_engine: Callable[[EngineConfig, Clock], Engine], clock: Clock
) -> AsyncIterator[EngineReport]:
    """Check one engine after the other.

    Raises:
        ConfigError: an engine computes on another device than it was told to.
        ArtifactError: an engine and the reference disagree.
        OverspillError: an engine cannot start, or failed.
    """
    for spec in specs:
        engine = make_engine(spec.engine, clock)
        tokenizer = spec.prompts().tokenizer
        prompts = [tokenizer.encode(text)[: _prompt_limit(spec)] for text in _TEXTS]
        await engine.start()
        try:
            _check_devices(spec, engine.info)
            began_s = clock.now_s()
            answers = await asyncio.gather(*(_answer(engine, prompt) for prompt in prompts))
            took_s = clock.now_s() - began_s
            devices = engine.info.devices if engine.info is not None else ()
        finally:
            await engine.stop()
        gap = await asyncio.to_thread(_gap, spec.engine, prompts, answers)
        most = _MOST_GAP[spec.engine.dtype]
        if gap is not None and not gap <= most:
            raise ArtifactError(
                f"{spec.info.replica_id} on {', '.join(devices)} in {spec.engine.dtype} chose a token that float32 "
                f"on the CPU rates {gap:.2f} lower than its own choice (at most {most:g} is rounding); do not serve "
                "with it: try dtype = 'float32', another driver or another torch"
            )
        tokens = sum(map(len, answers))
        yield EngineReport(spec.info.replica_id, devices, tokens, tokens / max(took_s, 1e-9), gap)


def _prompt_limit(spec: EngineSpec) -> int:
    return max(1, spec.info.context_tokens - _ANSWER_TOKENS - 1)


def _check_devices(spec: EngineSpec, info: EngineInfo | None) -> None:
    wanted = spec.engine.device
    found = info.devices if info is not None else ()
    if not found or any(device.split(" ")[0] != wanted for device in found):
        raise ConfigError(
            f"{spec.info.replica_id} should compute on {wanted} and computes on {', '.join(found) or 'nothing known'}",
            param="models.device",
        )


async def _answer(engine: Engine, prompt: list[int]) -> list[int]:
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    request = EngineRequest("engine-check", tuple(prompt), sampling, _ANSWER_TOKENS)
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids]


def _gap(engine: EngineConfig, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float | None:
    """Compute the prompts and the answers once more, on one CPU rank in float32."""
    from cloud_tier.engine.worker import load  # noqa: PLC0415 (the tier's own process never imports torch otherwise)

    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    blocks = -(-longest // engine.kv_block_tokens)
    reference = msgspec.structs.replace(
        engine,
        device="cpu",
        dtype="float32",
        tensor_parallel=1,
        gpus=(),
        threads=(usable_cores(),),
        kv_cache_tokens=max(2, blocks) * engine.kv_block_tokens,
        max_context_tokens=None,
    )
    # Weights on disk take between a half and two bytes a parameter, in memory four.
    size = sum(file.stat().st_size for file in _weight_files(Path(engine.weights)))
    if psutil.virtual_memory().available < 8 * size:
        return None
    model, _ = load(Setup(reference, 0, ""))
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        steps = [prompt, *([token] for token in answer[:-1])]
        start = 0
        for step, chosen in zip(steps, answer, strict=True):
            logits = model.forward([Segment(start, step, [(0, blocks)], draws=True)]).logits
            if logits is None:
                raise ArtifactError("the reference brought no logits")
            worst = max(worst, float(logits.max() - logits[0, chosen]))
            start += len(step)
    return worst


def _weight_files(weights: Path) -> list[Path]:
    return [weights] if weights.is_file() else sorted(weights.glob("*.safetensors"))
