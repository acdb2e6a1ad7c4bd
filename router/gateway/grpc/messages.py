"""The messages of `inference.proto`, read at run time into a pool of their own.

A pool of their own, because the process may hold Triton's client too, which registers the same names for itself. The
descriptor instead of generated code, because that would be tied to one release of protobuf.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"


def load_messages() -> dict[str, Any]:
    """Return the class of each message by its name without the package."""
    raw = resources.files("router.gateway.grpc").joinpath("inference.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(raw).file
    for file in files:
        pool.Add(file)
    names = [message.name for file in files for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in names}
