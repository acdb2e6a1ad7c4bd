"""`[[pipelines]]` of either tier's configuration: a stateless model as stages in a row."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from models.pipelines.batching import BatchSettings
from router.values.tensors import TensorSpec

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_STAGE = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class StageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage.

    Attributes:
        use: a built-in stage by name, or a function or class of the operator's own as `module:name`.
        options: what the stage is told; each built-in has its own.
        inputs, outputs: tensors of a function, or of an ONNX file that no manifest describes; of one input, without
            the dimension that counts inputs.
        reads: the stage's name of a tensor → its name in the pipeline, where they differ; writes: the same of outputs.
        instances: batches computed at once: threads, or processes, of its pool.
        max_batch: inputs computed together at most.
        max_wait_ms: how long an input may wait for company while an instance is idle; less where its deadline asks.
        buckets: lengths that inputs of one open dimension are padded to with zeros, ascending. Without them, only
            inputs of one shape are computed together.
        queue_inputs: inputs that may wait at this stage; while more do, the pipeline refuses new requests with 503.
        timeout_s: a batch that takes longer in a process has failed, and the process ends; 0 waits for ever.
    """

    name: str
    use: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    options: dict[str, Any] = {}
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    reads: dict[str, str] = {}
    writes: dict[str, str] = {}
    pool: Literal["threads", "processes"] = "threads"
    instances: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    max_batch: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    max_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0
    buckets: tuple[Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)], ...] = ()
    queue_inputs: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1024
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 300.0

    def __post_init__(self) -> None:
        if not _STAGE.fullmatch(self.name):
            raise ValueError(f"stage name {self.name!r}: use lower-case letters, digits, _ and - (at most 64)")
        _ = self.batching  # checks the buckets

    @property
    def batching(self) -> BatchSettings:
        return BatchSettings(self.max_batch, self.max_wait_ms, buckets=self.buckets)


class PipelineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pipeline: a rung of its family.

    Attributes:
        name: what callers ask for; family: the name of any of its rungs, its own where there is one rung.
        rung: 0 is the best; quality: in (0, 1], relative to rung 0 of the family.
        outputs: tensors that callers get, in this order; empty: those of the last stage.
        inputs_per_s: a first guess of its speed, until some were computed.
        queue_inputs: inputs inside at most, computed ones included; beyond that requests are refused with 503.
        queue_mib: memory that inputs inside may take as they came, and answers that are not whole yet: what would
            exceed it is refused. A stage waits while what inputs have become takes as much behind it.
        unload_idle_s: free its memory when it had no request for so long; 0 never does.
    """

    name: str
    family: str = ""
    rung: Annotated[int, msgspec.Meta(ge=0, le=99)] = 0
    quality: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    stages: Annotated[tuple[StageSettings, ...], msgspec.Meta(min_length=1, max_length=32)]
    outputs: tuple[str, ...] = ()
    inputs_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 50.0
    queue_inputs: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4096
    queue_mib: Annotated[int, msgspec.Meta(ge=1, le=1_048_576)] = 512
    unload_idle_s: Annotated[float, msgspec.Meta(ge=0, le=31_536_000)] = 0.0

    def __post_init__(self) -> None:
        for key, text in (("name", self.name), ("family", self.family_name)):
            if not _NAME.fullmatch(text):
                raise ValueError(f"{key} = {text!r}: use lower-case letters, digits and . _ - (at most 100)")
        names = [stage.name for stage in self.stages]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"pipeline `{self.name}` has two stages of the name {', '.join(twice)}: rename one")

    @property
    def family_name(self) -> str:
        return self.family or self.name

    @property
    def slots(self) -> int:
        """Requests that a replica is sent at once: what all stages compute together, and one more batch on its way."""
        sizes = [stage.max_batch * stage.instances for stage in self.stages]
        return sum(sizes) + max(sizes)


def check_pipelines(pipelines: tuple[PipelineSettings, ...]) -> None:
    """Check what no pipeline can see alone.

    Raises:
        ValueError: two have one name, or one rung of one family.
    """
    names: set[str] = set()
    rungs: dict[tuple[str, int], str] = {}
    for pipeline in pipelines:
        if pipeline.name in names:
            raise ValueError(f"pipelines: two have the name `{pipeline.name}`: rename one")
        names.add(pipeline.name)
        other = rungs.setdefault((pipeline.family_name, pipeline.rung), pipeline.name)
        if other != pipeline.name:
            raise ValueError(
                f"pipelines: `{other}` and `{pipeline.name}` both are rung {pipeline.rung} of "
                f"`{pipeline.family_name}`: give one another `rung`"
            )
