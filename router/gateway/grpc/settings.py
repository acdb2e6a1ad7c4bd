"""The `[grpc]` table of either tier."""

from __future__ import annotations

from typing import Annotated

import msgspec

_LAST_PORT = 65_535


class GrpcSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KServe V2 over gRPC, on a port of its own. It listens on the address of the HTTP gateway.

    Attributes:
        enabled: serve it; needs the extra `grpc`.
        port: 0 takes a free one and logs it; left out, it is the one after the port of the HTTP gateway.
    """

    enabled: bool = False
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = None

    def beside(self, http_port: int) -> int:
        """Return the port to listen on, 0 for any free one."""
        return self.port if self.port is not None else http_port + 1 if http_port else 0

    def check_beside(self, http_port: int, key: str) -> None:
        """See that there is a port for each.

        Args:
            key: of the port of the HTTP gateway.

        Raises:
            ValueError: both have one, or there is none after the last.
        """
        port = self.beside(http_port)
        if self.enabled and port and port == http_port:
            raise ValueError(f"grpc.port = {port} is {key} too: gRPC needs a port of its own")
        if self.enabled and port > _LAST_PORT:
            raise ValueError(f"grpc.port: there is none after {key} = {http_port}: set it")
