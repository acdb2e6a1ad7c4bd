"""What tenants use and are refused, as metrics of a bounded number of series."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.tenants.directory import Directory
from router.tenants.ledger import Ledger
from router.tenants.quota import Quota
from router.tenants.used import Counts

_MOST_TENANTS = 500
_OTHERS = "(others)"
_TOKENS = (("prompt", "prompt_tokens"), ("cached", "cached_tokens"), ("completion", "completion_tokens"))


class Watched(Protocol):
    """What is shown: the tenants of a tier."""

    directory: Directory
    ledger: Ledger

    @property
    def quotas(self) -> Mapping[str, Quota]: ...


class TenantMetrics(Collector):
    """Read when the page is asked for: requests pay nothing for it.

    The first 500 tenants that were seen have series of their own, all later ones share one.
    """

    def __init__(self, tenancy: Watched) -> None:
        self._tenancy = tenancy
        self._shown: dict[str, str] = {}

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        yield from self._used()
        yield from self._refused()
        tenancy = self._tenancy
        yield GaugeMetricFamily("overspill_tenant_keys", "Keys that open this tier.", value=len(tenancy.directory))
        yield GaugeMetricFamily(
            "overspill_tenant_keys_fault",
            "1 while the keys file as it is now is not in force.",
            value=float(bool(tenancy.directory.fault)),
        )
        yield GaugeMetricFamily(
            "overspill_tenant_usage_unwritten",
            "Rows of usage that wait to be written.",
            value=tenancy.ledger.unwritten if tenancy.ledger.lasting else 0,
        )

    def _used(self) -> Iterator[CounterMetricFamily]:
        requests = CounterMetricFamily(
            "overspill_tenant_requests", "Requests that got an answer.", labels=["tenant", "model"]
        )
        tokens = CounterMetricFamily(
            "overspill_tenant_tokens",
            "Tokens by kind; `cached` ones are part of those of the prompt.",
            labels=["tenant", "model", "kind"],
        )
        sums: dict[tuple[str, str], Counts] = {}
        for (tenant, model), counts in self._tenancy.ledger.totals.items():
            sums.setdefault((self._name(tenant), model), Counts()).add(counts)
        for (tenant, model), counts in sums.items():
            requests.add_metric([tenant, model], counts.requests)
            for kind, field in _TOKENS:
                tokens.add_metric([tenant, model, kind], getattr(counts, field))
        yield requests
        yield tokens

    def _refused(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        refused = CounterMetricFamily(
            "overspill_tenant_refused",
            "Requests refused for a limit of their tenant.",
            labels=["tenant", "limit"],
        )
        retries = CounterMetricFamily(
            "overspill_tenant_retries",
            "Requests that were retries, by whether they were earned.",
            labels=["tenant", "earned"],
        )
        running = GaugeMetricFamily("overspill_tenant_running", "Requests in the tier.", labels=["tenant"])
        sums: dict[tuple[str, str], int] = {}
        again: dict[tuple[str, str], int] = {}
        now: dict[str, int] = {}
        for tenant, quota in self._tenancy.quotas.items():
            name = self._name(tenant)
            now[name] = now.get(name, 0) + quota.running
            for limit, count in quota.refused.items():
                sums[name, limit] = sums.get((name, limit), 0) + count
            for earned, count in (("yes", quota.retries.seen - quota.retries.beyond), ("no", quota.retries.beyond)):
                again[name, earned] = again.get((name, earned), 0) + count
        for labels, count in sums.items():
            refused.add_metric(list(labels), count)
        for labels, count in again.items():
            retries.add_metric(list(labels), count)
        for name, count in now.items():
            running.add_metric([name], count)
        yield refused
        yield retries
        yield running

    def _name(self, tenant: str) -> str:
        known = self._shown.get(tenant)
        if known is None:
            known = self._shown[tenant] = (tenant or "(no key)") if len(self._shown) < _MOST_TENANTS else _OTHERS
        return known
