"""Load reports between tiers, as an ORCA header: `endpoint-load-metrics: JSON {...}`.

The totals carry the names that other routers read (`queue_depth`, `running`, `kv_cache_utilization`); each variant adds
its own named metrics (`<variant>|slots` …), from which the tier below rebuilds the snapshot of every remote rung.
ORCA allows numbers only as named metrics, so availability is 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from router.base.json_input import UNREADABLE
from router.values.credits import Grant
from router.values.replica import ReplicaSnapshot
from router.wire.credits import UnreadableCredits, grant_metrics, read_grant

HEADER = "endpoint-load-metrics"
FORMAT_HEADER = "endpoint-load-metrics-format"
"""A request with this header asks for a report on its own answer (the convention of Triton)."""

_FIGURES = ("slots", "running", "queued", "queued_prefill_tokens", "pending_decode_tokens")
_KV_FREE = "kv_free_tokens"
_ENGINES = "engines"
_SEPARATOR = "|"
_MAX_REPORT_CHARS = 64 * 1024
_MAX_FIGURE = 10**9


class VariantLoad(msgspec.Struct, frozen=True):
    """The load of one variant on one tier, summed over its replicas; fields as in `ReplicaSnapshot`.

    Attributes:
        kv_free_tokens: the most of any of its replicas: a prompt has to fit one of them. None where none knows.
        engines: that serve it now, each with slots of its own; 1 where nothing is told.
    """

    variant: str
    available: bool
    slots: int = 0
    running: int = 0
    queued: int = 0
    queued_prefill_tokens: int = 0
    pending_decode_tokens: int = 0
    kv_free_tokens: int | None = None
    engines: int = 1


class LoadReport(msgspec.Struct, frozen=True):
    """One tier's load now.

    Attributes:
        kv_usage: used share of the KV cache in [0, 1], None if no replica knows.
        waiting: requests in the tier's own queue, not bound to any replica yet.
        grant: what who asked for the report may send, None where the tier sets no limit.
        grant_unreadable: something is said about it that cannot be, so that what was said before holds.
    """

    variants: tuple[VariantLoad, ...] = ()
    kv_usage: float | None = None
    waiting: int = 0
    grant: Grant | None = None
    grant_unreadable: bool = False

    @property
    def running(self) -> int:
        return sum(v.running for v in self.variants)

    @property
    def queued(self) -> int:
        return self.waiting + sum(v.queued for v in self.variants)

    @property
    def slots(self) -> int:
        return sum(v.slots for v in self.variants if v.available)


def summarise(snapshots: Iterable[ReplicaSnapshot], *, kv_usage: float | None = None, waiting: int = 0) -> LoadReport:
    """Sum replica snapshots by variant; a variant is available when one of its replicas is."""
    merged: dict[str, VariantLoad] = {}
    for snapshot in snapshots:
        name = snapshot.info.variant
        merged[name] = _add(merged.get(name, VariantLoad(variant=name, available=False)), snapshot)
    return LoadReport(variants=tuple(merged.values()), kv_usage=kv_usage, waiting=waiting)


def _add(load: VariantLoad, snapshot: ReplicaSnapshot) -> VariantLoad:
    return VariantLoad(
        variant=load.variant,
        available=load.available or snapshot.available,
        slots=load.slots + (snapshot.slots if snapshot.available else 0),
        running=load.running + snapshot.running,
        queued=load.queued + snapshot.queued,
        queued_prefill_tokens=load.queued_prefill_tokens + snapshot.queued_prefill_tokens,
        pending_decode_tokens=load.pending_decode_tokens + snapshot.pending_decode_tokens,
        kv_free_tokens=_most(load.kv_free_tokens, snapshot.kv_free_tokens if snapshot.available else None),
        engines=_engines(load, snapshot),
    )


def _engines(load: VariantLoad, snapshot: ReplicaSnapshot) -> int:
    if not snapshot.available:
        return load.engines
    return snapshot.engines + (load.engines if load.available else 0)


def _most(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)


def encode_orca(report: LoadReport) -> str:
    """Return the value of the `endpoint-load-metrics` header. Variant names are ASCII catalogue names."""
    named: dict[str, float] = {"queue_depth": report.queued, "running": report.running}
    if report.waiting:
        named["waiting"] = report.waiting
    if report.kv_usage is not None:
        named["kv_cache_utilization"] = round(report.kv_usage, 4)
    for load in report.variants:
        named[f"{load.variant}{_SEPARATOR}available"] = int(load.available)
        for figure in _FIGURES:
            value = getattr(load, figure)
            if value:
                named[f"{load.variant}{_SEPARATOR}{figure}"] = value
        if load.kv_free_tokens is not None:  # none free is news, and not the same as not known
            named[f"{load.variant}{_SEPARATOR}{_KV_FREE}"] = load.kv_free_tokens
        if load.engines > 1:
            named[f"{load.variant}{_SEPARATOR}{_ENGINES}"] = load.engines
    if report.grant is not None:
        named.update(grant_metrics(report.grant))
    body: dict[str, object] = {"named_metrics": named}
    if report.slots:
        body["application_utilization"] = round((report.running + report.queued) / report.slots, 4)
    return "JSON " + msgspec.json.encode(body).decode()


class _Orca(msgspec.Struct):
    named_metrics: dict[str, float] = {}


_decoder = msgspec.json.Decoder(_Orca)


def decode_orca(value: str) -> LoadReport | None:
    """Read a report written by `encode_orca`; None if it is no JSON report (a figure nobody can read is no figure)."""
    kind, _, text = value.partition(" ")
    if kind.upper() != "JSON" or len(text) > _MAX_REPORT_CHARS:
        return None
    try:
        named = _decoder.decode(text).named_metrics
    except UNREADABLE:
        return None
    variants: dict[str, dict[str, int]] = {}
    for key, number in named.items():
        name, found, figure = key.rpartition(_SEPARATOR)
        if found:
            variants.setdefault(name, {})[figure] = _figure(number)
    kv_usage = named.get("kv_cache_utilization")
    grant, unreadable = None, False
    try:
        grant = read_grant(named)
    except UnreadableCredits:
        unreadable = True
    return LoadReport(
        variants=tuple(_variant(name, figures) for name, figures in variants.items()),
        kv_usage=kv_usage if kv_usage is not None and 0 <= kv_usage <= 1 else None,
        waiting=_figure(named.get("waiting", 0)),
        grant=grant,
        grant_unreadable=unreadable,
    )


def _figure(told: float) -> int:
    """Return a figure of a report as one that can be: whole, at least 0, and nothing that leaves arithmetic."""
    return int(min(max(told, 0), _MAX_FIGURE)) if math.isfinite(told) else 0


def _variant(name: str, figures: dict[str, int]) -> VariantLoad:
    return VariantLoad(
        variant=name,
        available=figures.get("available", 0) > 0,
        kv_free_tokens=figures.get(_KV_FREE),
        engines=max(figures.get(_ENGINES, 1), 1),
        **{figure: figures.get(figure, 0) for figure in _FIGURES},
    )
