"""Our messages are those of the protocol: held against what Triton's own client was generated from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from router.gateway.grpc.messages import SERVICE, load_messages
from tests.support.paths import REPOSITORY

FOLDER = REPOSITORY / "router/gateway/grpc"


def shape(descriptor) -> dict[str, tuple]:
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type.full_name if field.message_type else "",
            field.containing_oneof.name if field.containing_oneof else "",
        )
        for field in descriptor.fields
    }


def every(descriptor) -> list:
    return [descriptor, *(inner for nested in descriptor.nested_types for inner in every(nested))]


def theirs() -> dict:
    files = (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR)
    tops = [message for file in files for message in file.message_types_by_name.values()]
    return {found.full_name: found for top in tops for found in every(top)}


@pytest.mark.parametrize("name", sorted(load_messages()))
def test_each_message_has_the_fields_and_numbers_of_the_protocol(name: str) -> None:
    known = theirs()
    for ours in every(load_messages()[name].DESCRIPTOR):
        other = shape(known[ours.full_name])
        assert shape(ours).items() <= other.items()
        whole = ours.file.name == "inference.proto" and not ours.full_name.startswith("inference.Model")
        assert not whole or shape(ours).keys() == other.keys(), "nothing that a client may send is unknown"


def test_the_service_is_the_protocols() -> None:
    ours = next(iter(load_messages().values())).DESCRIPTOR.file.services_by_name["GRPCInferenceService"]
    assert ours.full_name == SERVICE
    other = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in ours.methods:
        same = other.methods_by_name[method.name]
        assert (method.input_type.full_name, method.output_type.full_name) == (
            same.input_type.full_name,
            same.output_type.full_name,
        )
        assert (method.client_streaming, method.server_streaming) == (same.client_streaming, same.server_streaming)


@pytest.mark.process
def test_the_descriptor_is_made_of_the_proto_file(tmp_path: Path) -> None:
    made = tmp_path / "made.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(FOLDER), f"--descriptor_set_out={made}"]
    subprocess.run([*command, "inference.proto"], check=True)
    assert made.read_bytes() == (FOLDER / "inference.binpb").read_bytes(), "run: make proto"
