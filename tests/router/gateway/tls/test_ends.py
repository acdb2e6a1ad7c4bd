"""What an operator's Prometheus is told of certificates: when they end, as they lie there now."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import trustme
from prometheus_client import CollectorRegistry

from router.gateway.tls.ends import CertificateEnds

END = dt.datetime(2031, 5, 6, tzinfo=dt.timezone.utc)


def test_each_file_has_its_end_and_a_renewal_counts_at_once(tmp_path: Path) -> None:
    authority, registry = trustme.CA(), CollectorRegistry()
    cert, broken = tmp_path / "server.pem", tmp_path / "broken.pem"

    def renew(end: dt.datetime) -> None:
        authority.issue_cert("localhost", not_after=end).cert_chain_pems[0].write_to_path(str(cert))

    def told() -> dict[str, float]:
        return {s.labels["file"]: s.value for family in registry.collect() for s in family.samples}

    renew(END)
    broken.write_text("-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n")
    registry.register(CertificateEnds([str(cert), "", str(broken), str(tmp_path / "gone.pem"), str(cert)]))
    assert told() == {str(cert): END.timestamp()}
    renew(END + dt.timedelta(days=90))
    assert told() == {str(cert): END.timestamp() + 90 * 86_400}
