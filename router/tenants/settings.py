"""The `[tenants]` table of either tier."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from router.tenants.certificate import is_network

CertificateHeader = Literal["off", "client-cert", "x-forwarded-client-cert", "x-client-cert", "ssl-client-cert"]
CERTIFICATE_HEADERS: tuple[str, ...] = tuple(name for name in get_args(CertificateHeader) if name != "off")


class TenantSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[tenants]`. It is read at start; the keys are in a file of their own, which is read whenever it changes.

    Attributes:
        database: where usage is kept: the path of an SQLite file, or an SQLAlchemy URL such as `postgresql+psycopg://…`,
            which several tiers may share; `env:NAME` is read from the environment. Empty: it is kept in memory, and
            monthly budgets begin anew with each start.
        retries: retries that each new request of a tenant earns; those beyond are turned away while anybody waits. 1
            turns away none.
        client_certificates: the request header in which a proxy that terminates TLS tells the certificate that it
            verified; `off` trusts none.
        trusted_proxies: addresses and networks whose word that header is.
    """

    database: str = ""
    retries: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    client_certificates: CertificateHeader = "off"
    trusted_proxies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what the types cannot say; msgspec puts the key's path in front of a ValueError."""
        for proxy in self.trusted_proxies:
            if not is_network(proxy):
                raise ValueError(f"trusted_proxies: `{proxy[:80]}` is no address or network such as 10.0.0.0/24")
        if self.client_certificates != "off" and not self.trusted_proxies:
            raise ValueError(
                "client_certificates without trusted_proxies would believe anybody: name the proxies that verify them"
            )
