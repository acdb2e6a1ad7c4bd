"""Tenants of a tier: who comes in, what each may still ask for, and what was used."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from prometheus_client import CollectorRegistry

from router.base.clock import Clock
from router.base.credentials import resolved
from router.base.errors import RateLimited
from router.base.timers import end
from router.tenants.certificate import certificate_digest, is_within, networks_of
from router.tenants.directory import Directory
from router.tenants.keys_file import KeyLine, clear_key
from router.tenants.ledger import Ledger
from router.tenants.metrics import TenantMetrics
from router.tenants.quota import Quota
from router.tenants.settings import TenantSettings
from router.tenants.stay import Stay
from router.tenants.tenant import NO_LIMITS, Caller, Limits, Tenant

_NOBODY = ""  # whom a tier without keys serves
_WAIT_S = 4.0  # a retry beyond its budget comes back later than others


@dataclass(frozen=True, slots=True)
class KeySources:
    """Where keys come from.

    Attributes:
        fixed: keys of the configuration or the environment, which are not reloaded.
        path: the file of tenants and keys.
        max_priority: of tenants that have no ceiling of their own.
    """

    fixed: Sequence[KeyLine] = ()
    path: Path | None = None
    max_priority: int = 0

    @classmethod
    def of(cls, keys: Mapping[str, int | None], max_priority: int = 0) -> KeySources:
        """Return keys without names, with the highest priority that each may claim."""
        return cls(tuple(clear_key(key, priority) for key, priority in keys.items()), None, max_priority)

    def directory(self) -> Directory:
        """Return who may come in.

        Raises:
            ConfigError: the file cannot be read, or is none.
        """
        found = Directory(self.fixed, self.path, self.max_priority)
        found.load()
        return found


class Tenancy:
    """Use as `async with`: it reads keys again and writes usage as long as it lives.

    Attributes:
        directory: who may come in.
        ledger: what was used.
    """

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        *,
        ledger: Ledger | None = None,
        settings: TenantSettings | None = None,
    ) -> None:
        self.directory = directory
        self.ledger = ledger or Ledger(None, clock)
        self.settings = settings or TenantSettings()
        self._clock = clock
        self._proxies = networks_of(self.settings.trusted_proxies)
        self._quotas: dict[str, Quota] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Tenancy:
        await self.ledger.__aenter__()
        for name, work in (("keys", self.directory.watch(self._clock)), ("usage", self.ledger.keep_writing())):
            self._tasks.append(asyncio.create_task(work, name=f"tenants-{name}"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end(*self._tasks)
        await self.ledger.__aexit__(kind, error, trace)

    def watch(self, registry: CollectorRegistry) -> None:
        """Show what tenants do in the metrics of the tier."""
        registry.register(TenantMetrics(self))

    @property
    def quotas(self) -> Mapping[str, Quota]:
        """By tenant: those that have sent anything."""
        return self._quotas

    def notices(self) -> list[str]:
        """What an operator should know."""
        directory, found = self.directory, []
        if directory.fault:
            found.append(f"keys not reloaded, those read before stay in force: {directory.fault}")
        elif directory.shut:
            found.append("nobody is let in: the keys file has no keys; `overspill cloud keys add` makes one")
        if directory.in_clear:
            found.append(
                f"{directory.in_clear} keys stand in the keys file in clear: `overspill cloud keys seal` hashes them"
            )
        if self.ledger.fault:
            found.append(f"usage cannot be written, and is kept in memory: {self.ledger.fault}")
        if self.ledger.damaged:
            found.append(self.ledger.damaged)
        if not self.ledger.lasting and any(t.limits.monthly_tokens for t in directory.tenants.values()):
            found.append("monthly budgets begin anew with each start: name a database in tenants.database")
        return found

    def by_certificate(self, headers: Mapping[str, str], peer: str | None) -> Caller | None:
        """Return whom a client certificate lets in that a trusted proxy tells of; None where there is none."""
        name = self.settings.client_certificates
        if name == "off" or name not in headers or peer is None or not is_within(peer, self._proxies):
            return None
        digest = certificate_digest(headers[name])
        return None if digest is None else self.directory.by_certificate(digest)

    def stay(self, caller: Caller, *, again: bool, in_slack: bool = False) -> Stay:
        """Return what keeps a request within the limits of its tenant; `again`: its client says that it is a retry.

        Work in the slack of others is bound by the budget of the month alone: it takes nothing of what its tenant may
        send a minute, or at once.
        """
        quota = self._quota_in_slack(caller.tenant) if in_slack else self.quota(caller.tenant)
        return Stay(quota, self.ledger, self._clock, caller.device, again, in_slack=in_slack)

    def _quota_in_slack(self, tenant: Tenant | None) -> Quota:
        name, limits = (_NOBODY, NO_LIMITS) if tenant is None else (tenant.name, tenant.limits)
        budget = Limits(monthly_tokens=limits.monthly_tokens)
        return Quota(name, budget, lambda: self.ledger.spent(name), self.ledger.month_ends_s, self._clock.now_s())

    def arrived(self, stay: Stay, fingerprint: int, *, crowded: bool) -> None:
        """A request is complete: where others wait, a retry beyond its tenant's budget goes first.

        Raises:
            RateLimited: it is one.
        """
        stay.fingerprint = fingerprint
        share, now_s = self.settings.retries, self._clock.now_s()
        beyond = stay.quota.retries.came(fingerprint, now_s, share, again=stay.again)
        if beyond and share < 1.0 and crowded:
            stay.quota.refused["retries"] += 1
            raise RateLimited(
                f"this is a retry, and more than {share:.0%} of the requests of this key were retries lately: while "
                "others wait, new requests go first",
                retry_after_s=_WAIT_S * (1 + fingerprint % 997 / 997),  # those who were refused together come apart
                what="retries",
            )

    def quota(self, tenant: Tenant | None) -> Quota:
        """Return the state of a tenant, under its present limits."""
        name = _NOBODY if tenant is None else tenant.name
        limits = NO_LIMITS if tenant is None else tenant.limits
        found = self._quotas.get(name)
        if found is None:
            ledger = self.ledger
            found = self._quotas[name] = Quota(
                name, limits, lambda: ledger.spent(name), ledger.month_ends_s, self._clock.now_s()
            )
        found.reconfigure(limits, self._clock.now_s())
        return found


def check_usage_database(settings: TenantSettings) -> None:
    """Look at what `open_tenancy`'s tenants could not keep usage in; makes and changes nothing.

    Raises:
        ConfigError: the database cannot be used; names the remedy.
    """
    database = resolved(settings.database, "tenants.database", os.environ)
    if database:
        from router.tenants.database import UsageDatabase  # noqa: PLC0415 - as below

        UsageDatabase(database).look()


def open_tenancy(keys: KeySources, settings: TenantSettings, database: str, clock: Clock) -> Tenancy:
    """Return the tenants of a tier, as it is configured.

    Args:
        database: where usage is kept, as a path or a URL; empty: in memory alone.

    Raises:
        ConfigError: the file of keys cannot be read, or is none.
    """
    kept = None
    if database:
        from router.tenants.database import UsageDatabase  # noqa: PLC0415 - only who keeps usage pays for SQLAlchemy

        kept = UsageDatabase(database)
    return Tenancy(keys.directory(), clock, ledger=Ledger(kept, clock), settings=settings)
