"""When certificates end, as a metric: one that nobody renewed takes its tier, or its device, out of service."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.base.pem import first_end_s


class CertificateEnds(Collector):
    """Looks into the files at each scrape: they are renewed while the tier runs.

    Args:
        files: certificates that this tier shows, and lists of revoked ones that it goes by; an empty name is no file.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._files = sorted({name for name in files if name})

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance: it would read them."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield one family; a file that cannot be read, or never ends, has no sample."""
        ends = GaugeMetricFamily(
            "overspill_certificate_ends_timestamp_seconds",
            "When the first of the certificates, or of the lists of revoked ones, in a file ends, in Unix time.",
            labels=["file"],
        )
        for name in self._files:
            try:
                end_s = first_end_s(Path(name).read_bytes())
            except (OSError, ValueError):
                continue
            if end_s < float("inf"):
                ends.add_metric([name], end_s)
        yield ends
