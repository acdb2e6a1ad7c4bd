"""The `[telemetry]` table of either tier."""

from __future__ import annotations

from typing import Annotated

import msgspec

from router.base.credentials import url_fault


class TelemetrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where traces go. It is read at start; no document of the fleet may set it.

    Attributes:
        otlp_endpoint: an OpenTelemetry collector's OTLP over HTTP, e.g. `http://127.0.0.1:4318`; empty: no traces are
            made. Headers with a collector's key, its certificate and time-outs come from the standard variables
            (`OTEL_EXPORTER_OTLP_HEADERS`, …).
        sample_ratio: share of the traces that begin here which are exported; of the others the caller has decided.
    """

    otlp_endpoint: str = ""
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        """Check the URL; msgspec puts the table's name in front of a ValueError."""
        if self.otlp_endpoint and url_fault(self.otlp_endpoint):
            shown = "" if "@" in self.otlp_endpoint else f" `{self.otlp_endpoint[:200]}`"
            raise ValueError(
                f"otlp_endpoint{shown}: expected the base URL of a collector, such as http://127.0.0.1:4318; a key "
                "goes into $OTEL_EXPORTER_OTLP_HEADERS"
            )
