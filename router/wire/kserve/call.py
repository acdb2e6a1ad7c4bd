"""What a V2 request asks, however it came: over HTTP as JSON or with binary tensors, or over gRPC.

A text model takes `text_input` (BYTES: one raw prompt, or a batch of them in shape [N] or [N, 1]) and returns
`text_output` in the same shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.base.errors import InvalidRequest
from router.values.request import ApiRequest
from router.values.sampling import SamplingParams
from router.values.task import Call
from router.wire.kserve.parameters import TEXT_INPUT, Parameters, read_parameters, text_of
from router.wire.kserve.tensors import Tensor

VERSION = "1"
MAX_PROMPTS = 256
"""Of one request: each is a request to the router, and takes a place of its own."""
MAX_TENSORS = 64  # more than this protocol has names for
ERROR_OUTPUT = "error"
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "INT32",
    "num_output_tokens": "INT32",
    ERROR_OUTPUT: "BYTES",
}


@dataclass(frozen=True, slots=True)
class PromptCall:
    """One prompt of a request, and how it shall be answered."""

    text: str
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class CallInfer:
    """A decoded request to a model that generates no text.

    Attributes:
        outputs: name → as bytes.
    """

    call_id: str | None
    call: Call
    deadline_s: float | None
    outputs: tuple[tuple[str, bool], ...]

    def request(self, model: str) -> ApiRequest:
        """Return it as the router takes it."""
        return ApiRequest(model, self.call, SamplingParams(max_tokens=1), deadline_s=self.deadline_s)


@dataclass(frozen=True, slots=True)
class InferCall:
    """A decoded request.

    Attributes:
        call_id: the caller's own id, echoed in the body.
        prompts: at least one, in the order of the tensor.
        shape: of `text_input`, and so of every output.
        deadline_s: from `parameters.timeout`, which the protocol counts in microseconds.
        echo: the prompt is repeated in front of the answer (`exclude_input_in_output`: false).
        stream: whether the answer is asked for piece by piece; None where nothing is said.
        final_marker: the end of a stream shall be told by a response of its own, as Triton's clients ask for it.
        outputs: name → as bytes.
    """

    call_id: str | None
    prompts: tuple[PromptCall, ...]
    shape: tuple[int, ...]
    deadline_s: float | None = None
    echo: bool = False
    stream: bool | None = None
    final_marker: bool = False
    outputs: tuple[tuple[str, bool], ...] = (("text_output", False),)

    @property
    def text(self) -> str:
        """The first prompt: the only one, where one was sent."""
        return self.prompts[0].text


def infer_call(
    call_id: str | None,
    parameters: Mapping[str, Any],
    tensors: Sequence[Tensor],
    outputs: Sequence[tuple[str, Mapping[str, Any]]],
) -> InferCall:
    """Make sense of a request whose tensors are read.

    Args:
        outputs: name and parameters of each that was asked for.

    Raises:
        InvalidRequest: naming the tensor or parameter at fault.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) < len(tensors):
        raise InvalidRequest("`inputs`: two tensors have one name", param="inputs")
    text = by_name.pop(TEXT_INPUT, None)
    if text is None:
        raise InvalidRequest(f"`inputs`: the tensor `{TEXT_INPUT}` is required", param="inputs")
    count = _prompts_in(text)
    for name, tensor in by_name.items():
        if len(tensor.elements) not in {1, count}:
            raise InvalidRequest(
                f"`{name[:80]}`: shape {list(tensor.shape)}, expected one element, or one for each of {count} prompts",
                param=name,
            )
    rows = count if any(len(tensor.elements) > 1 for tensor in by_name.values()) else 1
    read = [read_parameters(parameters, by_name, row) for row in range(rows)]
    _refuse_differences(read)
    samplings = [found.sampling for found in read]
    first = read[0]
    return InferCall(
        call_id=call_id,
        prompts=tuple(PromptCall(_prompt(text, index), samplings[index if rows > 1 else 0]) for index in range(count)),
        shape=text.shape,
        deadline_s=first.timeout_s,
        echo=not first.exclude_input_in_output,
        stream=first.stream,
        final_marker=first.triton_enable_empty_final_response,
        outputs=_outputs(outputs, first),
    )


def _prompts_in(text: Tensor) -> int:
    count = len(text.elements)
    if len(text.shape) > 2 or (len(text.shape) == 2 and text.shape[1] != 1) or not 1 <= count <= MAX_PROMPTS:
        raise InvalidRequest(
            f"`{TEXT_INPUT}`: shape {list(text.shape)}, expected [N] or [N, 1] with 1 to {MAX_PROMPTS} prompts",
            param=TEXT_INPUT,
        )
    return count


def _prompt(text: Tensor, index: int) -> str:
    found = text_of(text, text.elements[index])
    if not found:
        which = TEXT_INPUT if len(text.elements) == 1 else f"{TEXT_INPUT}[{index}]"
        raise InvalidRequest(f"`{which}` is empty", param=which)
    return found


def _refuse_differences(read: Sequence[Parameters]) -> None:
    """What holds for the whole request must be the same for each of its prompts."""
    for name in ("exclude_input_in_output", "stream"):
        if len({getattr(found, name) for found in read}) > 1:
            raise InvalidRequest(f"`{name}`: differs between the prompts of one request", param=name)


def asked_outputs(
    wanted: Sequence[tuple[str, Mapping[str, Any]]], known: Collection[str], *, binary: bool
) -> list[tuple[str, bool]]:
    """Return the outputs that a request names, each with whether it goes as bytes.

    Raises:
        InvalidRequest: naming the output or parameter at fault.
    """
    found = []
    for index, (name, parameters) in enumerate(wanted):
        if name not in known:
            at = f"outputs[{index}].name"
            raise InvalidRequest(f"`{at}`: no such output; known outputs: {', '.join(known)}", param=at)
        as_bytes = parameters.get("binary_data", binary)
        if not isinstance(as_bytes, bool):
            at = f"outputs[{index}].parameters.binary_data"
            raise InvalidRequest(f"`{at}`: expected true or false", param=at)
        found.append((name, as_bytes))
    return found


def _outputs(wanted: Sequence[tuple[str, Mapping[str, Any]]], read: Parameters) -> tuple[tuple[str, bool], ...]:
    binary = read.binary_data_output
    found = asked_outputs(wanted, OUTPUTS, binary=binary) or [("text_output", binary)]
    named = {name for name, _ in found}
    return (*found, *((name, binary) for name in read.telling if name not in named))
