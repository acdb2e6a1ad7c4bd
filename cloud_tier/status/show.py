"""How a tier looks on a terminal: replicas with load, KV use, rung, breaker and cold starts; its GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from cloud_tier.fleet.table import FoldingTable, Row
from router.values.status import GpuReadings, GpuStatus, JobsStatus, ReplicaStatus, TierStatus

_REPLICA = (("rung", 4), ("kind", 9), ("run", 9), ("wait", 4), ("KV", 5), ("breaker", 9), ("cold", 11))
_GPU = (("memory GiB", 13), ("busy", 5), ("W", 5), ("°C", 4))
_BREAKER_STYLE = {"closed": "green", "half_open": "yellow", "open": "red"}
_ABSENT = "-"
_DIGEST, _SHORT = re.compile(r"^(sha256:[0-9a-f]{12})[0-9a-f]+$"), r"\1"


def tier_as_table(status: TierStatus, url: str, *, fit: bool = False) -> RenderableType:
    """Return everything.

    Args:
        fit: show no more replicas than a terminal has lines.
    """
    router = status.router
    parts: list[RenderableType] = [_head(status, url), _load(status)]
    if status.jobs is not None:
        parts.append(_jobs(status.jobs))
    parts += [Text(f"notice: {notice}", style="yellow") for notice in status.notices]
    parts += [Text(source, style="red") for source in router.unreached]
    if router.replicas:
        rows = [_replica(replica) for replica in router.replicas]
        parts.append(FoldingTable("replica", _REPLICA, rows, fit=fit))
    else:
        parts.append(Text("no replica is known yet", style="yellow"))
    parts.append(_gpus(status.gpus))
    return Group(*parts)


def away(url: str, why: str) -> RenderableType:
    """Return what stands in place of a tier that does not answer."""
    return Text(f"{url}: {why}", style="red")


def _head(status: TierStatus, url: str) -> Text:
    text = Text(f"{status.tier} tier at {url}: ", style="bold")
    text.append("ready" if status.ready else f"not ready ({status.why})", style="green" if status.ready else "red")
    text.append(f", up {lasted(status.up_s)}, overspill {status.overspill or 'of unknown version'}, ")
    text.append(f"policy {status.router.policy}")
    return text


def _load(status: TierStatus) -> Text:
    router = status.router
    text = Text(f"{router.waiting} waiting ({router.queued} in the tier's queue), {router.running} running, ")
    text.append(f"{status.in_flight} in the gateway")
    if router.overloaded:
        text.append("; overloaded: quality is given up for promises", style="yellow")
    return text


def _jobs(jobs: JobsStatus) -> Text:
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in jobs.batches.items()) or "none"
    text = Text(f"batches: {counts}; {jobs.lines_running} lines running")
    if jobs.held:
        text.append(f", held: {jobs.held}", style="yellow")
    text.append(f"; {jobs.deferred} deferred requests wait; {jobs.held_bytes / 1e6:.1f} MB on the disk")
    if jobs.database_fault:
        text.append(f"; no jobs are taken: {jobs.database_fault}", style="yellow")
    if jobs.webhook_fault:
        text.append(f"; the webhook is not told: {jobs.webhook_fault}", style="yellow")
    return text


def _replica(replica: ReplicaStatus) -> Row:
    facts = replica.facts
    load = f"{replica.running}/{replica.slots}"
    cells: list[str | Text] = [
        replica.replica,
        str(replica.rung),
        facts.kind or _ABSENT,
        Text(load, style="" if replica.available else "red"),
        str(replica.waiting),
        _ABSENT if facts.kv_usage is None else f"{100 * facts.kv_usage:.0f} %",
        Text(replica.breaker, style=_BREAKER_STYLE.get(replica.breaker, "")),
        _cold(replica),
    ]
    return Row(cells, "; ".join(_remarks(replica)))


def _cold(replica: ReplicaStatus) -> str:
    facts = replica.facts
    if facts.cold_starts is None:
        return _ABSENT
    took = "" if facts.cold_start_s is None else f" x {facts.cold_start_s:.1f} s"
    return f"{facts.cold_starts}{took}"


def _remarks(replica: ReplicaStatus) -> Iterator[str]:
    """Yield what has no column: its version, what it runs on, why it is out."""
    facts = replica.facts
    if not replica.available:
        back = f", back in {lasted(replica.back_in_s)}" if replica.back_in_s else ""
        yield f"unavailable: {replica.why or 'no reason given'}{back}"
    if replica.breaker_why:
        yield f"breaker: {replica.breaker_why}"
    if facts.software:
        on = ", ".join(dict.fromkeys(facts.computes_on))
        yield f"{facts.software}{f' on {on}' if on else ''}"
    if facts.version:
        yield f"version {_DIGEST.sub(_SHORT, facts.version)}"
    if replica.remote:
        yield f"all told {replica.load_running} running, {replica.load_queued} queued, {lasted(replica.load_age_s)} ago"


def _gpus(readings: GpuReadings) -> RenderableType:
    if not readings.gpus:
        return Text(f"GPUs: no figures: {readings.why_none}", style="dim")
    rows = [Row(_gpu(gpu), f"held down: {', '.join(gpu.throttled)}" if gpu.throttled else "") for gpu in readings.gpus]
    return FoldingTable("GPU", _GPU, rows)


def _gpu(gpu: GpuStatus) -> list[str | Text]:
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    return [
        f"{gpu.index} {gpu.name}",
        _ABSENT if used is None or total is None else f"{used / 2**30:.1f}/{total / 2**30:.1f}",
        _ABSENT if gpu.utilization is None else f"{100 * gpu.utilization:.0f} %",
        _ABSENT if gpu.power_w is None else f"{gpu.power_w:.0f}",
        _ABSENT if gpu.temperature_c is None else f"{gpu.temperature_c:.0f}",
    ]


def lasted(seconds: float) -> str:
    """Return a duration in the two units that matter."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {whole} s"
    return f"{hours} h {minutes_left} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
