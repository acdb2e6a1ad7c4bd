"""Sampling parameters of a V2 request: in its `parameters`, as tensors of the same names, or as JSON in a tensor.

As with Triton's vLLM backend. What is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from router.base.errors import InvalidRequest
from router.base.shapes import Key, Misfit, dotted, misfit, value_at
from router.values.sampling import SamplingParams
from router.wire.body import shown, with_whole_numbers
from router.wire.kserve.protocol import ProtocolFields
from router.wire.kserve.tensors import Element, Tensor
from router.wire.sampling import (
    COMPLETION_MAX_TOKENS,
    MaxTokens,
    MinTokens,
    Penalty,
    Probability,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    nucleus,
    stop_strings,
)

TEXT_INPUT = "text_input"
SAMPLING_INPUT = "sampling_parameters"
INPUTS: dict[str, type] = {
    "max_tokens": int,
    "min_tokens": int,
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": int,
    "seed": int,
    "stop": str,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "ignore_eos": bool,
    "exclude_input_in_output": bool,
    "stream": bool,
    "return_finish_reason": bool,
    "return_num_input_tokens": bool,
    "return_num_output_tokens": bool,
}


class Parameters(ProtocolFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that a request may say besides its prompt."""

    max_tokens: MaxTokens = COMPLETION_MAX_TOKENS
    min_tokens: MinTokens = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    min_p: Probability = 0.0
    top_k: TopK = 0
    seed: Seed | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    ignore_eos: bool = False
    exclude_input_in_output: bool = True
    stream: bool | None = None
    # Asks of Triton's vLLM backend, for outputs of those names.
    return_finish_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False

    @property
    def telling(self) -> tuple[str, ...]:
        """The outputs that are asked for beside the text."""
        asked = (
            ("finish_reason", self.return_finish_reason),
            ("num_input_tokens", self.return_num_input_tokens),
            ("num_output_tokens", self.return_num_output_tokens),
        )
        return tuple(name for name, wanted in asked if wanted)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=nucleus(self.top_p),
            min_p=self.min_p,
            top_k=max(0, self.top_k),
            seed=self.seed,
            stop=stop_strings(self.stop),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            ignore_eos=self.ignore_eos,
        )


# Those of the protocol last: who mistyped one most likely meant another.
_KNOWN = sorted(Parameters.__struct_fields__, key=ProtocolFields.__struct_fields__.__contains__)


def read_parameters(given: Mapping[str, Any], tensors: Mapping[str, Tensor], row: int = 0) -> Parameters:
    """Read what was asked for one prompt.

    Args:
        given: the request's `parameters`.
        tensors: all inputs but the text; of one element for every prompt, or of one for each.
        row: which prompt.

    Raises:
        InvalidRequest: naming the parameter or tensor at fault.
    """
    merged: dict[str, Any] = dict(given)
    for name, tensor in tensors.items():
        value = tensor.elements[row if len(tensor.elements) > 1 else 0]
        if name == SAMPLING_INPUT:
            merged.update(_loose(text_of(tensor, value)))
        elif name not in INPUTS:
            known = ", ".join([TEXT_INPUT, SAMPLING_INPUT, *INPUTS])
            raise InvalidRequest(f"`{name[:80]}`: no such input; known inputs: {known}", param=name)
        else:
            merged[name] = text_of(tensor, value) if tensor.datatype == "BYTES" else value
    merged = with_whole_numbers(merged)
    try:
        found = msgspec.convert(merged, Parameters, strict=True)
    except msgspec.ValidationError as error:
        raise _wrong_parameter(merged, given, str(error)) from None
    found.refuse_unserved()
    return found


def text_of(tensor: Tensor, value: Element) -> str:
    """Return an element of `tensor` as text.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, bytes):
        raise InvalidRequest(f"`{tensor.name}`: datatype {tensor.datatype}, expected BYTES", param=tensor.name)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"`{tensor.name[:80]}` is no valid UTF-8: {error.reason}", param=tensor.name) from None


def _wrong_parameter(merged: Mapping[str, Any], given: Mapping[str, Any], error: str) -> InvalidRequest:
    """Name a parameter as it was sent: in `parameters`, or as a tensor."""
    found = misfit(merged, Parameters) or Misfit((), error)
    if found.unknown is not None:
        key: Key = (found.unknown[:80],)
        what = f"no such parameter; known parameters: {', '.join(_KNOWN)}"
    else:
        key, what = found.key, found.what
    where = dotted(("parameters", *key) if not key or key[0] in given else key)
    value = None if found.unknown is not None else value_at(merged, found.key)
    return InvalidRequest(f"`{where}`{shown(value)}: {what}", param=where)


def _loose(text: str) -> dict[str, Any]:
    """Read the JSON object in `sampling_parameters`; its numbers may be strings, as clients of vLLM write them."""
    try:
        raw = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"`{SAMPLING_INPUT}` is no valid JSON: {error}", param=SAMPLING_INPUT) from None
    if not isinstance(raw, dict):
        raise InvalidRequest(f"`{SAMPLING_INPUT}`: expected a JSON object", param=SAMPLING_INPUT)
    try:
        found = msgspec.convert(raw, Parameters, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`{SAMPLING_INPUT}`: {error}", param=SAMPLING_INPUT) from None
    return {name: getattr(found, name) for name in raw}
