"""What a text model of a KServe V2 server takes and returns, from its metadata and its Triton configuration.

| backend             | told by its inputs     | sampling goes into                                       |
|---------------------|------------------------|----------------------------------------------------------|
| Triton's vLLM       | `sampling_parameters`  | that tensor, as JSON                                     |
| TensorRT-LLM        | `beam_width`           | tensors of its own names; greedy is its `top_k` of 1     |
| any other           |                        | tensors of our names where it has them, else parameters  |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from router.upstream.codec import constrained
from router.upstream.settings import KServeSettings
from router.values.feature import Feature

Endpoint = Literal["generate_stream", "generate", "infer"]

SAMPLING_JSON = "sampling_parameters"
_MAX_INSTANCES = 100_000
_Dimension = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
# A sampling parameter → what inputs for it are called.
_INPUT_NAMES: Mapping[str, Sequence[str]] = {
    "max_tokens": ("max_tokens", "request_output_len"),
    "temperature": ("temperature",),
    "top_p": ("top_p", "runtime_top_p"),
    "top_k": ("top_k", "runtime_top_k"),
    "seed": ("seed", "random_seed"),
    "stop": ("stop", "stop_words"),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "repetition_penalty": ("repetition_penalty",),
    "ignore_eos": ("ignore_eos",),
    "min_p": ("min_p",),
    "min_tokens": ("min_tokens",),
}
_TOLD_ANYWAY = ("max_tokens", "temperature", "top_p")
"""Parameters that a request tells of although no input is called so."""
_NEEDED = {
    "top_k": {Feature.TOP_K},
    "seed": {Feature.SEED},
    "presence_penalty": {Feature.PENALTIES},
    "frequency_penalty": {Feature.PENALTIES},
    "repetition_penalty": {Feature.REPETITION_PENALTY},
    "ignore_eos": {Feature.IGNORE_EOS},
    "min_p": {Feature.MIN_P},
    "min_tokens": {Feature.MIN_TOKENS},
}
_NEVER = (
    Feature.STOP_IDS,
    Feature.LOGIT_BIAS,
    Feature.ALLOWED_IDS,
    Feature.LOGPROBS,
    Feature.PROMPT_LOGPROBS,
    *constrained.lacking({}),
    Feature.TOOLS,
    Feature.CONTINUED_TOOLS,
)
"""What no request tells such a model."""


class TensorSpec(msgspec.Struct, frozen=True):
    """An input or output as the metadata describes it; a dimension of -1 is open."""

    name: str
    datatype: str = "BYTES"
    shape: Annotated[tuple[_Dimension, ...], msgspec.Meta(max_length=8)] = (1,)

    @property
    def one(self) -> list[int]:
        """The shape of a single element."""
        return [1] * len(self.shape)


class Metadata(msgspec.Struct, frozen=True):
    """`GET /v2/models/NAME`."""

    inputs: Annotated[list[TensorSpec], msgspec.Meta(max_length=1000)] = []
    outputs: Annotated[list[TensorSpec], msgspec.Meta(max_length=1000)] = []
    parameters: Any = None

    @property
    def context_tokens(self) -> int | None:
        """The window, as a tier of ours tells it; the protocol has no place for one."""
        told = self.parameters.get("context_tokens") if isinstance(self.parameters, dict) else None
        return told if type(told) is int and 1 <= told < 2**31 else None


class _InstanceGroup(msgspec.Struct, frozen=True):
    count: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INSTANCES)] = 1
    gpus: list[int] = []


class _TransactionPolicy(msgspec.Struct, frozen=True):
    decoupled: bool = False


class _Step(msgspec.Struct, frozen=True):
    model_name: str


class _Ensemble(msgspec.Struct, frozen=True):
    step: Annotated[list[_Step], msgspec.Meta(max_length=1000)] = []


class _Parameter(msgspec.Struct, frozen=True):
    string_value: Any = ""


class TritonConfig(msgspec.Struct, frozen=True):
    """`GET /v2/models/NAME/config`, an extension of Triton; the parts that matter here."""

    backend: str = ""
    max_batch_size: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INSTANCES)] = 0
    instance_group: list[_InstanceGroup] = []
    model_transaction_policy: _TransactionPolicy = _TransactionPolicy()
    ensemble_scheduling: _Ensemble | None = None
    parameters: dict[str, _Parameter] = {}

    @property
    def steps(self) -> list[str]:
        """The models that an ensemble is made of."""
        return [step.model_name for step in self.ensemble_scheduling.step] if self.ensemble_scheduling else []

    @property
    def decoupled(self) -> bool:
        """Whether it may answer a request with several responses: only then it can stream."""
        return self.model_transaction_policy.decoupled

    @property
    def slots(self) -> int | None:
        """Requests that it runs at once; None where the backend batches by itself and does not tell."""
        if self.backend == "vllm":
            return None
        instances = sum(group.count * max(1, len(group.gpus)) for group in self.instance_group)
        found = max(1, self.max_batch_size) * (instances or 1)
        return None if self.ensemble_scheduling and not self.max_batch_size else min(found, _MAX_INSTANCES)

    @property
    def context_tokens(self) -> int | None:
        """The window, where whoever wrote the configuration noted it under one of its usual names."""
        for name in ("max_model_len", "max_seq_len", "max_sequence_length", "context_tokens"):
            told = str(self.parameters[name].string_value) if name in self.parameters else ""
            if told.isascii() and told.isdigit() and 1 <= int(told[:11]) < 2**31:
                return int(told)
        return None


@dataclass(frozen=True, slots=True)
class TextModel:
    """How to put a request to one model.

    Attributes:
        name: the server's.
        inputs, outputs: by name.
        spelling: sampling parameter → input or request parameter; what is missing is not sent.
        sampling_json: all of them go into one tensor.
        greedy_by_top_k: it has no temperature of 0.
        context_tokens, slots: None where the server does not tell.
        decoupled: whether it can stream.
    """

    name: str
    endpoint: Endpoint
    settings: KServeSettings
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    spelling: Mapping[str, str]
    sampling_json: bool = False
    greedy_by_top_k: bool = False
    context_tokens: int | None = None
    slots: int | None = None
    lacks: frozenset[Feature] = field(default_factory=frozenset)


def text_model(
    name: str, metadata: Metadata, config: TritonConfig | None, settings: KServeSettings, *, streams: bool
) -> TextModel | None:
    """Return how to put requests to a model; None if it takes or returns no text.

    A server that tells of no tensors at all is believed to have those of the settings.

    Args:
        config: None where the server is no Triton.
        streams: it, or a step of the ensemble that it is, answers piece by piece.
    """
    inputs = {spec.name: spec for spec in metadata.inputs} or {settings.text_input: TensorSpec(settings.text_input)}
    outputs = {spec.name: spec for spec in metadata.outputs} or {settings.text_output: TensorSpec(settings.text_output)}
    for found, wanted in ((inputs, settings.text_input), (outputs, settings.text_output)):
        if wanted not in found or found[wanted].datatype != "BYTES":
            return None
    sampling_json = SAMPLING_JSON in inputs
    spelling = {name: name for name in _INPUT_NAMES} if sampling_json else _spelling(inputs)
    spelling = {own: there for own, there in {**spelling, **settings.spelling}.items() if there}
    endpoint: Endpoint
    if settings.endpoint != "auto":
        endpoint = settings.endpoint
    elif config is None:
        endpoint = "infer"
    else:
        endpoint = "generate_stream" if streams else "generate"
    return TextModel(
        name=name,
        endpoint=endpoint,
        settings=settings,
        inputs=inputs,
        outputs=outputs,
        spelling=spelling,
        sampling_json=sampling_json,
        greedy_by_top_k="beam_width" in inputs and "top_k" in spelling,
        context_tokens=metadata.context_tokens or (config.context_tokens if config else None),
        slots=config.slots if config else None,
        lacks=_lacks(spelling),
    )


def _spelling(inputs: Mapping[str, TensorSpec]) -> dict[str, str]:
    found = {name: name for name in _TOLD_ANYWAY}
    for name, called in _INPUT_NAMES.items():
        known = next((candidate for candidate in called if candidate in inputs), None)
        if known is not None:
            found[name] = known
    return found


def _lacks(spelling: Mapping[str, str]) -> frozenset[Feature]:
    lacking = {Feature.PROMPT_IDS, Feature.CONTINUED_IDS, *_NEVER}
    for name, features in _NEEDED.items():
        if name not in spelling:
            lacking |= features
    return frozenset(lacking)
