"""Who is served: tenants and their limits, and the callers whom their keys let in. Frozen values."""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from router.base.credentials import MAX_PRIORITY

Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A tenant's or a device's name: it stands in metrics, logs and files of comma-separated values."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a tenant may ask for; None sets no bound.

    Attributes:
        priority: the highest priority that it may claim; None: what the tier allows those who say nothing.
        requests_per_minute: requests that reach the tier, refused ones of other limits included.
        tokens_per_minute: of prompts and answers together.
        concurrency: requests in the tier at once, streams included.
        monthly_tokens: of prompts and answers together, in a calendar month of UTC.
        models: patterns (`*`, `?`) of families and variants that it may see and ask for; empty: all.
    """

    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrency: Count | None = None
    monthly_tokens: Annotated[int, msgspec.Meta(ge=1, le=10**15)] | None = None
    models: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=128)], ...] = ()

    def admits(self, model: str) -> bool:
        """Whether the tenant may know of a model."""
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)


NO_LIMITS = Limits()


class Role(enum.Enum):
    """What a key opens beside inference."""

    CALLER = "caller"
    """Its own tenant's decisions and usage."""
    MONITOR = "monitor"
    """Also `/metrics`, `/v1/status` and `/v1/scale`, which tell of everybody together."""
    OPERATOR = "operator"
    """Also every tenant's decisions and usage."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody who has keys.

    Attributes:
        digest: tells its requests apart, wherever its name is nobody's business: KV caches, decision records.
    """

    name: str
    digest: str
    limits: Limits = NO_LIMITS

    @classmethod
    def named(cls, name: str, limits: Limits = NO_LIMITS) -> Tenant:
        return cls(name, hashlib.sha256(f"tenant {name}".encode()).hexdigest(), limits)

    @classmethod
    def of_key(cls, digest: str, priority: int | None) -> Tenant:
        """Return the tenant of a key that has no name: that key alone."""
        return cls(f"key-{digest[:8]}", digest, Limits(priority=priority))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as far as its credentials tell.

    Attributes:
        digest: of its tenant; empty where the tier has no keys.
        max_priority: higher priorities that it claims are lowered to this one.
        tenant: None where the tier has no keys.
        device: the device whose token or certificate it is; empty for a key that is nobody's in particular.
    """

    digest: str = ""
    max_priority: int = 0
    tenant: Tenant | None = field(default=None, repr=False)
    device: str = ""
    role: Role = Role.CALLER

    @property
    def sees_all(self) -> bool:
        """Whether decisions and usage of everybody are its business."""
        return self.tenant is None or self.role is Role.OPERATOR

    @property
    def may_monitor(self) -> bool:
        """Whether pages that tell of everybody together are its business."""
        return self.tenant is None or self.role is not Role.CALLER

    def may_use(self, model: str) -> bool:
        return self.tenant is None or self.tenant.limits.admits(model)


NOBODY = Caller()
