"""…/generate and …/generate_stream, Triton's extension: tensors of one element as plain JSON fields.

`text_input` and sampling parameters stand at the top, or below `parameters`; the reply has its outputs at the top.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.wire.body import decode_json
from router.wire.kserve.call import OUTPUTS, VERSION, InferCall, PromptCall
from router.wire.kserve.parameters import INPUTS, SAMPLING_INPUT, TEXT_INPUT, Parameters, read_parameters
from router.wire.kserve.reply import Row, output_tensors
from router.wire.kserve.tensors import Tensor, to_json
from router.wire.names import refuse_fields, refuse_names


class _Generate(msgspec.Struct, frozen=True):
    text_input: str
    id: Annotated[str, Meta(max_length=1024)] | None = None
    parameters: dict[str, Any] = {}
    outputs: list[str] = []


_decoder = msgspec.json.Decoder(_Generate)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
GENERATE_BODY = _Generate  # what the API's description shows


def decode_generate(body: bytes) -> InferCall:
    """Decode the body of …/generate and …/generate_stream.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_decoder, body)
    refuse_fields(body, frozenset({*_Generate.__struct_fields__, *INPUTS, SAMPLING_INPUT}))
    refuse_names(raw.parameters, "parameters")
    if not raw.text_input:
        raise InvalidRequest(f"`{TEXT_INPUT}` is empty", param=TEXT_INPUT)
    given, tensors = dict(raw.parameters), []
    for name, value in _fields_decoder.decode(body).items():
        if name in INPUTS:
            given[name] = msgspec.json.decode(value)
        elif name == SAMPLING_INPUT:
            tensors.append(_sampling_tensor(bytes(value)))
        elif name not in _Generate.__struct_fields__:
            known = ", ".join([TEXT_INPUT, SAMPLING_INPUT, *INPUTS, "parameters", "id"])
            raise InvalidRequest(f"`{name[:80]}`: no such input; known inputs: {known}", param=name[:80])
    read = read_parameters(given, {tensor.name: tensor for tensor in tensors})
    return InferCall(
        call_id=raw.id,
        prompts=(PromptCall(raw.text_input, read.sampling),),
        shape=(1,),
        deadline_s=read.timeout_s,
        echo=not read.exclude_input_in_output,
        stream=read.stream,
        outputs=_outputs(raw.outputs, read),
    )


def _sampling_tensor(value: bytes) -> Tensor:
    """Return what stands there as the text of a tensor: a JSON object, or a string that holds one."""
    text = msgspec.json.decode(value, type=str).encode() if value.startswith(b'"') else value
    return Tensor(SAMPLING_INPUT, "BYTES", (1,), (text,))


def _outputs(wanted: list[str], read: Parameters) -> tuple[tuple[str, bool], ...]:
    for index, name in enumerate(wanted):
        if name not in OUTPUTS:
            at = f"outputs[{index}]"
            raise InvalidRequest(f"`{at}`: no such output; known outputs: {', '.join(OUTPUTS)}", param=at)
    return tuple((name, False) for name in dict.fromkeys([*(wanted or ["text_output"]), *read.telling]))


def encode_generate(model: str, call: InferCall, row: Row) -> bytes:
    """Encode an answer, or a piece of one."""
    body: dict[str, object] = {"model_name": model, "model_version": VERSION}
    if call.call_id is not None:
        body["id"] = call.call_id
    for tensor, _ in output_tensors(call, [row]):
        body[tensor.name] = to_json(tensor)[0]
    return orjson.dumps(body)
