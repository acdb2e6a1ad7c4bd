"""The logged outcome beside the replayed ones: the same figures of each, in a table, and what they cannot tell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from router.replay.log import Log, LoggedRequest
from router.replay.world import LEFT, Replay
from router.simulation.run import Result
from router.simulation.values import SimRow

NOWHERE = "nowhere"
_REFUSED = frozenset({"shed", "unavailable", "evicted"})

NOTE = (
    "What a replay cannot know:",
    "- what callers would have done: who is refused comes back, who waits leaves, a chat goes on from its answer;",
    "- the length of answers that were never finished: it is drawn from those that were (product-limit estimate);",
    "- other tenants' load on an upstream, its own queue and its own policy: it is simulated as if it were idle else;",
    "- caches: prompts that begin alike were faster or slower depending on what ran before;",
    "- outages, throttling and slow links of that time: speeds and links are those of the whole log.",
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What became of the requests of a log, or of a replay; callers who left are not among them.

    Attributes:
        kept, whole, refused: shares of the requests: whole and every promise kept; whole; turned away.
        quality: mean of the rungs that gave whole answers.
        ttft_p50_s …: of those that had a first token; finish_…: of whole answers. NaN where there were none.
        kept_by_seed: lowest and highest `kept` of the seeds; None of what was logged.
        went: tier and variant → share of the requests; `nowhere` for those that no replica got.
    """

    requests: int
    kept: float
    whole: float
    refused: float
    quality: float
    ttft_p50_s: float
    ttft_p95_s: float
    finish_p50_s: float
    finish_p95_s: float
    went: dict[str, float] = field(default_factory=dict)
    kept_by_seed: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class _Fate:
    kept: bool
    whole: bool
    refused: bool
    quality: float
    ttft_s: float | None
    finish_s: float
    where: str


def logged(log: Log) -> Figures:
    """Return the figures of what was logged."""
    return _figures([_fate_of(request) for request in log.requests if not request.left])


def replayed(results: Sequence[Result]) -> Figures:
    """Return the figures of a policy over all its seeds."""
    fates = [[_fate(row) for row in result.rows if row.kind != LEFT] for result in results]
    kept = [_figures(of_seed).kept for of_seed in fates]
    return replace(_figures([fate for of_seed in fates for fate in of_seed]), kept_by_seed=(min(kept), max(kept)))


def _fate_of(request: LoggedRequest) -> _Fate:
    return _Fate(
        kept=request.kept,
        whole=request.whole,
        refused=request.refused,
        quality=request.quality,
        ttft_s=request.ttft_s,
        finish_s=request.finish_s,
        where=f"{request.tier} {request.variant}" if request.attempts else NOWHERE,
    )


def _fate(row: SimRow) -> _Fate:
    return _Fate(
        kept=row.kept,
        whole=row.whole,
        refused=row.outcome in _REFUSED,
        quality=row.quality,
        ttft_s=row.ttft_s,
        finish_s=row.finish_s,
        where=f"{row.tier} {row.variant}" if row.variant else NOWHERE,
    )


def _figures(fates: Sequence[_Fate]) -> Figures:
    count = max(len(fates), 1)
    firsts = sorted(fate.ttft_s for fate in fates if fate.ttft_s is not None)
    finishes = sorted(fate.finish_s for fate in fates if fate.whole)
    qualities = [fate.quality for fate in fates if fate.whole]
    where = Counter(fate.where for fate in fates)
    return Figures(
        requests=len(fates),
        kept=sum(fate.kept for fate in fates) / count,
        whole=sum(fate.whole for fate in fates) / count,
        refused=sum(fate.refused for fate in fates) / count,
        quality=fmean(qualities) if qualities else math.nan,
        ttft_p50_s=_quantile(firsts, 0.5),
        ttft_p95_s=_quantile(firsts, 0.95),
        finish_p50_s=_quantile(finishes, 0.5),
        finish_p95_s=_quantile(finishes, 0.95),
        went={name: number / count for name, number in sorted(where.items())},
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else math.nan


_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("requests", lambda f: f"{f.requests:,}"),
    ("whole, promises kept", lambda f: _percent(f.kept)),
    ("  least and most of a seed", lambda f: _range(f.kept_by_seed)),
    ("whole", lambda f: _percent(f.whole)),
    ("refused", lambda f: _percent(f.refused)),
    ("mean quality", lambda f: "–" if math.isnan(f.quality) else f"{f.quality:.3f}"),
    ("first token, p50", lambda f: _time(f.ttft_p50_s)),
    ("first token, p95", lambda f: _time(f.ttft_p95_s)),
    ("finish, p50", lambda f: _time(f.finish_p50_s)),
    ("finish, p95", lambda f: _time(f.finish_p95_s)),
)


def table(columns: Sequence[tuple[str, Figures]]) -> Iterator[str]:
    """Yield the lines of a table: a figure a row, what was logged or replayed a column."""
    places = sorted({place for _, figures in columns for place in figures.went}, key=lambda p: (p == NOWHERE, p))
    rows = [(name, [show(figures) for _, figures in columns]) for name, show in _ROWS]
    rows += [(f"to {place}", [_percent(f.went.get(place, 0.0)) for _, f in columns]) for place in places]
    first = max(len(name) for name, _ in rows)
    widths = [max(len(title), *(len(cells[i]) for _, cells in rows)) for i, (title, _) in enumerate(columns)]
    yield _line("", [title for title, _ in columns], first, widths)
    for name, cells in rows:
        yield _line(name, cells, first, widths)


def about(replay: Replay) -> Iterator[str]:
    """Say what was read from the log, and what the simulated world is made of."""
    log, lengths = replay.log, replay.lengths
    left = sum(request.left for request in log.requests)
    yield (
        f"{len(log.requests):,} requests in {_time(log.lasted_s)}, decided by {', '.join(log.policies())}"
        + (f"; {left:,} left by their callers are replayed to their end, and not compared" if left else "")
        + (f"; {log.invalid:,} that nobody could ever serve are left out" if log.invalid else "")
        + (f"; {log.skipped:,} damaged lines skipped" if log.skipped else "")
    )
    for device in replay.world.devices:
        link = f", {device.link.rtt_ms:.0f} ms and {device.link.uplink_mbps:.1f} Mbit/s away" if device.remote else ""
        yield f"{device.name}: {device.slots} slots{link}"
    for name, speed in replay.speeds.items():
        source = f"from {speed.answers:,} answers" if speed.answers else "as the router knew it: no answer was seen"
        yield (
            f"  {name}: prefill {speed.prefill_tokens_per_s:,.0f} tokens/s, {speed.step_s * 1e3:.1f} ms a token alone, "
            f"{source}"
        )
    yield (
        f"lengths: {len(lengths.tokens) - lengths.drawn:,} as they ended, {lengths.drawn:,} drawn from those"
        + (f", {lengths.beyond:,} of which outlast all that was seen" if lengths.beyond else "")
    )
    down = [f"{n} in {_percent(r.down / r.rows)}" for n, r in log.replicas.items() if r.down]
    if down:
        yield f"could not take requests at times, which is not replayed: {', '.join(down)} of the decisions"


def _line(name: str, cells: Iterable[str], first: int, widths: Sequence[int]) -> str:
    return f"{name:<{first}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _range(shares: tuple[float, float] | None) -> str:
    return "" if shares is None else f"{100 * shares[0]:.1f} – {_percent(shares[1])}"


def _time(value_s: float) -> str:
    if math.isnan(value_s):
        return "–"
    return f"{value_s * 1e3:,.0f} ms" if value_s < 10 else f"{value_s:,.1f} s"
