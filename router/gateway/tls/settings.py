"""The `[tls]` table of either tier."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """TLS of the tier's own ports; without a certificate they speak plainly.

    Attributes:
        cert_file, key_file: PEM; the certificate first, then those between it and the root.
        client_ca_file: PEM of the authorities whose client certificates are believed.
        client_crl_file: PEM of what they have revoked: one list of each authority that issues client certificates.
        client_certificates: `required` lets nobody connect without one, probes included; `optional` asks for one, so
            that a certificate opens the tier where keys are needed, and keys do as well.
        reload_s: how often the files are looked at; a renewed certificate is served to new connections.
    """

    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_crl_file: str = ""
    client_certificates: Literal["off", "optional", "required"] = "off"
    reload_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 10.0

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("a certificate and its key belong together: set cert_file and key_file, or neither")
        if (self.client_certificates != "off") != bool(self.client_ca_file):
            raise ValueError(
                'client_certificates = "optional" or "required" goes with a client_ca_file: set both, or neither'
            )
        if self.client_crl_file and not self.client_ca_file:
            raise ValueError(
                "client_crl_file lists what authorities have revoked: set their client_ca_file, or neither"
            )
        if self.client_ca_file and not self.cert_file:
            raise ValueError("client_ca_file without a certificate of the server's own: set cert_file and key_file")

    @property
    def enabled(self) -> bool:
        return bool(self.cert_file)

    @property
    def files(self) -> tuple[str, ...]:
        """What is looked at; an empty name is no file."""
        return (self.cert_file, self.key_file, self.client_ca_file, self.client_crl_file)
