"""The `[grpc]` table of either tier."""

from __future__ import annotations

from typing import Annotated

import msgspec


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
