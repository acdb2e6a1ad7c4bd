"""The network of a simulation: bandwidth over time, and the path to one remote device with what is learnt about it."""

from __future__ import annotations

import csv
import gzip
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TextIO

import numpy as np

from router.base.errors import ConfigError
from router.signals.link import Link
from router.simulation.loop import LoopClock, VirtualLoop
from router.simulation.world import DEFAULT_UPLINK_MBPS, LinkSpec

_PACKET_BITS = 1500 * 8
_MAX_LINES = 5_000_000

_Rates = tuple[list[float], list[float]]  # seconds, and megabits a second from then on


class Bandwidth:
    """Bits that a link can carry over time; begins anew when it ends.

    Args:
        times_s: from 0 on, ascending; the last is the end.
        bits: carried from 0 to each of them.
    """

    def __init__(self, times_s: Sequence[float], bits: Sequence[float]) -> None:
        self._times_s = array("d", times_s)
        self._bits = array("d", bits)
        self._period_s, self._period_bits = self._times_s[-1], self._bits[-1]

    @classmethod
    def constant(cls, mbps: float) -> Bandwidth:
        return cls((0.0, 1.0), (0.0, mbps * 1e6))

    def scaled(self, factor: float) -> Bandwidth:
        """Return a link of `factor` times the rate at every moment."""
        return Bandwidth(self._times_s, [carried * factor for carried in self._bits])

    def bits_until(self, at_s: float) -> float:
        """Return the bits that are carried from 0 to `at_s`."""
        periods, offset_s = divmod(at_s, self._period_s)
        return periods * self._period_bits + self._bits_within(offset_s)

    def end_s(self, begin_s: float, bits: float) -> float:
        """Return when `bits` that begin at `begin_s` have been carried."""
        periods, offset_s = divmod(begin_s, self._period_s)
        more, rest = divmod(self._bits_within(offset_s) + bits, self._period_bits)
        if rest == 0.0 and more:  # to the end of a period, not to the begin of the next
            more, rest = more - 1.0, self._period_bits
        after = bisect_left(self._bits, rest)
        at_s = self._times_s[after]
        if after and self._bits[after] > rest:
            before_s, before_bits = self._times_s[after - 1], self._bits[after - 1]
            at_s = before_s + (rest - before_bits) / (self._bits[after] - before_bits) * (at_s - before_s)
        return (periods + more) * self._period_s + at_s

    def _bits_within(self, offset_s: float) -> float:
        """Return the bits that are carried from the begin of a period to `offset_s` of it."""
        times_s, bits = self._times_s, self._bits
        after = bisect_right(times_s, offset_s)
        if after == len(times_s):
            return bits[-1]
        before_s, carried = times_s[after - 1], bits[after - 1]
        return (bits[after] - carried) / (times_s[after] - before_s) * (offset_s - before_s) + carried


@lru_cache(64)
def load_bandwidth(path: Path, name: str, column: str) -> Bandwidth:
    """Read a network trace: a mahimahi packet trace (no header), or CSV with `t_s` and a column of rates.

    Args:
        name: which trace of a CSV with a column `trace`; empty where it holds one.
        column: the column of rates; megabits a second, or kilobits where its name ends in `kbps`.

    Raises:
        ConfigError: it cannot be read; names file, line and what is expected.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            first = lines.readline()
            if first.strip().isdigit():
                return _packets(path, [first, *lines])
            return _rates(path, name, column, csv.DictReader(_again(first, lines)))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the network trace {path}: {error}", param="trace") from error


def _again(first: str, rest: TextIO) -> Iterator[str]:
    yield first
    yield from rest


def _packets(path: Path, lines: Sequence[str]) -> Bandwidth:
    """Each line is a millisecond at which one packet may pass; a line again is one packet more."""
    if len(lines) > _MAX_LINES:
        raise ConfigError(f"{path}: more than {_MAX_LINES} packets", param="trace")
    at_ms: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.strip().isdigit() or (at_ms and int(line) < at_ms[-1]):
            raise ConfigError(
                f"{path}: line {number}: {line.strip()!r}: expected ascending milliseconds", param="trace"
            )
        at_ms.append(int(line))
    moments, packets = np.unique(np.asarray(at_ms), return_counts=True)
    times_s = np.concatenate([[0.0], (moments + 1) / 1e3])  # a packet of millisecond k has passed at its end
    return Bandwidth(times_s.tolist(), np.concatenate([[0.0], np.cumsum(packets) * _PACKET_BITS]).tolist())


def _rates(path: Path, name: str, column: str, rows: csv.DictReader[str]) -> Bandwidth:
    known = rows.fieldnames or []
    for needed in ("t_s", column):
        if needed not in known:
            there = ", ".join(map(str, known))
            raise ConfigError(f"{path}: no column {needed!r}; there are {there}. Set `trace_column`", param="trace")
    unit = 1e-3 if column.endswith("kbps") else 1.0
    traces: dict[str, tuple[list[float], list[float]]] = {}
    for number, row in enumerate(rows, 2):
        times_s, mbps = traces.setdefault(row.get("trace") or "", ([], []))
        try:
            at_s, rate = float(row["t_s"]), float(row[column]) * unit
        except (TypeError, ValueError):
            raise ConfigError(f"{path}: line {number}: t_s and {column} have to be numbers", param="trace") from None
        if rate < 0 or (times_s and at_s < times_s[-1]):
            raise ConfigError(f"{path}: line {number}: times have to ascend, rates not be negative", param="trace")
        if not times_s or at_s > times_s[-1]:  # of two rows of one time, the first
            times_s.append(at_s)
            mbps.append(rate)
    return _from_rates(path, *_chosen(path, name, traces))


def _chosen(path: Path, name: str, traces: Mapping[str, _Rates]) -> _Rates:
    """Return the trace of that name, or the only one where none is named."""
    if name in traces:
        return traces[name]
    some = ", ".join(list(traces)[:5])
    if name or not traces:
        raise ConfigError(f"{path}: no rows of the trace {name!r}; there are e.g. {some}", param="trace_name")
    if len(traces) > 1:
        raise ConfigError(
            f"{path} holds {len(traces)} traces; set `trace_name` to one, e.g. {some}", param="trace_name"
        )
    return next(iter(traces.values()))


def _from_rates(path: Path, times_s: Sequence[float], mbps: Sequence[float]) -> Bandwidth:
    starts_s = np.asarray(times_s) - times_s[0]
    gaps_s = np.diff(starts_s)
    last_s = float(np.median(gaps_s)) if len(gaps_s) else 1.0
    ends_s = np.concatenate([starts_s[1:], [starts_s[-1] + last_s]])
    bits = np.concatenate([[0.0], np.cumsum((ends_s - starts_s) * np.asarray(mbps) * 1e6)])
    if bits[-1] <= 0:
        raise ConfigError(f"{path}: the trace carries nothing at all", param="trace")
    return Bandwidth([0.0, *ends_s.tolist()], bits.tolist())


class NetworkPath:
    """The link to one remote device: an uplink that all requests share, and what the router has learnt about it.

    Attributes:
        known: the router's estimates.
    """

    def __init__(self, spec: LinkSpec, endpoint: str, report_interval_s: float, loop: VirtualLoop) -> None:
        self.known = Link(endpoint, clock=LoopClock(loop))
        self._slower = 1.0
        self._share = 1.0
        self._cut_from_s = self._cut_until_s = 0.0
        self._spec = spec
        self._bandwidth = bandwidth_of(spec)
        self._interval_s = report_interval_s
        self._loop = loop
        self._uplink_free_s = 0.0
        self._reported_at_s = -1.0

    @property
    def cut(self) -> bool:
        """Whether nothing passes now."""
        return self._loop.now_s < self._cut_until_s

    def cut_off(self, until_s: float) -> None:
        """Let nothing pass from now until then, on the loop's time."""
        self._cut_from_s, self._cut_until_s = self._loop.now_s, until_s

    def worsen(self, uplink_factor: float, rtt_factor: float) -> None:
        """Set what the uplink's rate and round trips are of what they should be; 1 and 1 is as it should."""
        self._share, self._slower = uplink_factor, rtt_factor

    def one_way_s(self, noise: float) -> float:
        """Return seconds for a small packet that is sent now; one sent into a cut is sent again at its end."""
        held_s = max(self._cut_until_s - self._loop.now_s, 0.0)
        return held_s + self._spec.rtt_ms / 2e3 * noise * self._slower

    def send(self, sent_bytes: int, noise: float) -> float:
        """Take a body onto the uplink; return when it has arrived, on the loop's time."""
        now_s = self._loop.now_s
        begins_s = max(now_s, self._uplink_free_s, self._cut_until_s)
        self._uplink_free_s = self._bandwidth.end_s(begins_s, sent_bytes * 8 / self._share)
        self.known.observe_transfer(sent_bytes, self._uplink_free_s - now_s)
        return self._uplink_free_s + self._spec.rtt_ms / 2e3 * noise * self._slower

    def report_age_s(self) -> float:
        """Return the age of the last load report; one that came since the last call has taught the round trip."""
        now_s = self._loop.now_s
        heard_s = self._cut_from_s if now_s < self._cut_until_s else now_s
        last_s = heard_s // self._interval_s * self._interval_s
        if last_s > self._reported_at_s:
            self._reported_at_s = last_s
            self.known.observe_rtt(self._spec.rtt_ms / 1e3 * self._slower)
        return now_s - last_s


def bandwidth_of(spec: LinkSpec) -> Bandwidth:
    """Return the uplink of a link.

    Raises:
        ConfigError: its trace cannot be read.
    """
    if not spec.trace:
        return Bandwidth.constant(DEFAULT_UPLINK_MBPS if spec.uplink_mbps is None else spec.uplink_mbps)
    return load_bandwidth(Path(spec.trace), spec.trace_name, spec.trace_column)
