"""An upper bound on what any policy could have achieved in a simulation: a linear program over buckets of time.

Choose x_o ∈ [0, 1] for each option o (a request j on a rung of a device d), and y_jdk, the work on it in bucket k:

    maximise    Σ value_o · x_o
    subject to  Σ over the options of a request of x_o ≤ 1
                Σ_k y_jdk = Σ over the rungs of d of work_o · x_o      device-seconds
                Σ_j y_jdk ≤ length_k
                y_jdk ≤ Σ over the rungs of d of most_ok · x_o

`most_ok` is what a request can take of a device inside a bucket: 1 device-second a second of prefill, while its window
leaves time for it, and beside that c/D of decode, the share that a sequence has in the fullest batch (the letters are
those of `router.simulation.service`). The program may interrupt, move and split requests and knows all lengths, all
noise and the future, so no policy beats it under the same service times. An answer that is worth less after its
deadline counts in full until it is worth nothing.

Requests that promised nothing have no end. Their work is one stock for each device, which grows as they arrive; who
waited longer than `max_wait_s` must be in the device, and no more than all its rungs' slots can be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from router.base.errors import OverspillError
from router.simulation.replica import Truth
from router.simulation.service import Floats, Ints, ServiceOptions, service_options
from router.simulation.values import SimRequest
from router.simulation.world import World

BUCKETS = 150
MAX_WAIT_S = 30.0
_TAIL_S = 86_400.0  # the last bucket, where requests without an end come to theirs
_FORM = 1  # changes when the program does: what is cached under another form is not read


class BoundError(OverspillError):
    """The linear program has no solution that can be trusted."""

    code = "bound_failed"


@dataclass(frozen=True, slots=True)
class Bound:
    """An upper bound on Σ value.

    Attributes:
        most: Σ value of all requests at the best quality that they could get alone.
    """

    value: float
    most: float


def upper_bound(
    world: World,
    requests: Sequence[SimRequest],
    truths: Sequence[Truth],
    *,
    buckets: int = BUCKETS,
    max_wait_s: float = MAX_WAIT_S,
) -> Bound:
    """Return the bound on the value of `requests` under their true lengths and noise.

    Raises:
        BoundError: the solver gave up; says why.
    """
    options = service_options(world, requests, truths, late=True)
    if not len(options):
        return Bound(0.0, 0.0)
    best = np.zeros(len(requests))
    np.maximum.at(best, options.request, options.value)
    slots = np.array([device.slots * len(device.rungs) for device in world.devices])
    return Bound(_solve(_Program(options, slots, buckets, max_wait_s)), float(best.sum()))


def cached_upper_bound(
    folder: Path, world: World, requests: Sequence[SimRequest], truths: Sequence[Truth], *, buckets: int = BUCKETS
) -> Bound:
    """Return `upper_bound`, kept in `folder` under a digest of all that it depends on; no policy is part of that."""
    options = service_options(world, requests, truths, late=True)
    digest = hashlib.sha256(f"{_FORM}/{buckets}/{MAX_WAIT_S}/{len(requests)}".encode())
    digest.update(repr([(device.slots, len(device.rungs)) for device in world.devices]).encode())
    for name in ServiceOptions.__slots__:
        digest.update(np.ascontiguousarray(getattr(options, name)).tobytes())
    path = folder / f"{digest.hexdigest()[:32]}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Bound(float(kept["value"]), float(kept["most"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there yet, or cut short by an end of the process: it is computed, and written whole
    bound = upper_bound(world, requests, truths, buckets=buckets)
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{id(options):x}.part")
    part.write_text(json.dumps({"value": bound.value, "most": bound.most}) + "\n", encoding="utf-8")
    part.replace(path)
    return bound


class _Rows:
    """Rows of a sparse matrix, gathered in blocks."""

    def __init__(self) -> None:
        self.count = 0
        self.limits: list[Floats] = []
        self._at: list[Ints] = []
        self._columns: list[Ints] = []
        self._values: list[Floats] = []

    def block(self, limits: Floats) -> int:
        """Begin a block of rows with these right sides; return the position of its first."""
        first, self.count = self.count, self.count + len(limits)
        self.limits.append(limits)
        return first

    def put(self, at: Ints, columns: Ints, values: Floats | float) -> None:
        self._at.append(at)
        self._columns.append(columns)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), at.shape))

    def matrix(self, columns: int) -> coo_array:
        cells = (np.concatenate(self._at), np.concatenate(self._columns))
        return coo_array((np.concatenate(self._values), cells), shape=(self.count, columns)).tocsr()


class _Program:
    """The program's matrices. Columns: x of the options, y, work and stock of device and bucket."""

    def __init__(self, options: ServiceOptions, slots: Ints, buckets: int, max_wait_s: float) -> None:
        self.options, self.slots, self.max_wait_s = options, slots, max_wait_s
        self.endless = ~np.isfinite(options.end_s)
        ends_s = options.end_s[~self.endless]
        wait_s = max_wait_s if self.endless.any() else 1e-3
        last_s = max(float(options.begin_s.max()) + wait_s, float(ends_s.max(initial=0.0)))
        edges_s = np.linspace(float(options.begin_s.min()), last_s, buckets + 1)
        if self.endless.any():
            edges_s = np.append(edges_s, last_s + _TAIL_S)
        self.edges_s, self.lengths_s = edges_s, np.diff(edges_s)
        self.at_most, self.equal = _Rows(), _Rows()
        self.columns = len(options)
        self._shares_of_requests()
        self._capacity = self.at_most.block(np.tile(self.lengths_s, len(slots)))
        self._with_an_end()
        if self.endless.any():
            for device in np.unique(options.device[self.endless]):
                self._without_an_end(int(device))

    def _new_columns(self, count: int) -> Ints:
        self.columns += count
        return np.arange(self.columns - count, self.columns)

    def _shares_of_requests(self) -> None:
        options = self.options
        self.at_most.block(np.ones(int(options.request.max()) + 1))
        self.at_most.put(options.request, np.arange(len(options)), 1.0)

    def _with_an_end(self) -> None:
        """Work in each bucket that a request's window on a device touches; its rungs there have one column for it."""
        options, edges_s, count = self.options, self.edges_s, len(self.lengths_s)
        chosen = np.flatnonzero(~self.endless)
        if not len(chosen):
            return
        first = np.searchsorted(edges_s, options.begin_s[chosen], side="right") - 1
        last = np.minimum(np.searchsorted(edges_s, options.end_s[chosen], side="left") - 1, count - 1)
        rank, bucket = _spans(first, last + 1)
        option = chosen[rank]
        place = options.request * len(self.slots) + options.device
        cells, cell = np.unique(place[option] * count + bucket, return_inverse=True)
        y = self._new_columns(len(cells))
        places, row = np.unique(cells // count, return_inverse=True)
        done = self.equal.block(np.zeros(len(places)))
        self.equal.put(done + row, y, 1.0)
        self.equal.put(done + np.searchsorted(places, place[chosen]), chosen, -options.work_s[chosen])
        device = places[row] % len(self.slots)
        self.at_most.put(self._capacity + device * count + cells % count, y, 1.0)
        # Where a bucket is long enough for all the work, its limit says nothing.
        work_s = options.work_s[option]
        most_s = np.minimum(self._most_s(option, bucket), work_s)
        tight = np.zeros(len(cells), dtype=np.bool_)
        tight[cell[most_s < work_s]] = True
        limit = self.at_most.block(np.zeros(int(tight.sum()))) + np.cumsum(tight) - 1
        self.at_most.put(limit[tight], y[tight], 1.0)
        held = tight[cell]
        self.at_most.put(limit[cell[held]], option[held], -most_s[held])

    def _most_s(self, option: Ints, bucket: Ints) -> Floats:
        """Return the device-seconds that a request can take in a bucket."""
        options = self.options
        from_s = np.maximum(self.edges_s[bucket], options.begin_s[option])
        until_s = self.edges_s[bucket + 1]
        open_s = np.maximum(np.minimum(until_s, options.end_s[option]) - from_s, 0.0)
        early_s = np.maximum(np.minimum(until_s, options.prefill_end_s[option]) - from_s, 0.0)
        prefill_s = np.minimum(options.prefill_s[option], np.minimum(early_s, open_s))
        alone_s = options.alone_s[option]
        share = np.where(alone_s > 0, options.share_s[option] / np.where(alone_s > 0, alone_s, 1.0), 0.0)
        decode_from_s = np.maximum(self.edges_s[bucket], (options.begin_s + options.prefill_s)[option])
        decode_s = np.maximum(np.minimum(until_s, options.end_s[option]) - decode_from_s, 0.0)
        most_s: Floats = np.minimum(prefill_s + share * np.minimum(open_s - prefill_s, decode_s), open_s)
        return most_s

    def _without_an_end(self, device: int) -> None:
        """One stock of work: what arrived and is not done yet, and how much of it may be old."""
        options, count = self.options, len(self.lengths_s)
        own = np.flatnonzero(self.endless & (options.device == device))
        work_s = options.work_s[own]
        arrives = np.searchsorted(self.edges_s, options.begin_s[own], side="right") - 1
        done, stock = self._new_columns(count), self._new_columns(count)
        rows = self.equal.block(np.zeros(count)) + np.arange(count)
        self.equal.put(rows, stock, 1.0)
        self.equal.put(rows[1:], stock[:-1], -1.0)
        self.equal.put(rows, done, 1.0)
        self.equal.put(rows[arrives], own, -work_s)
        self.at_most.put(self._capacity + device * count + np.arange(count), done, 1.0)
        inside_s = float(np.sort(work_s)[::-1][: self.slots[device]].sum())
        limits = np.full(count, inside_s)
        limits[-1] = 0.0  # at the end of time all is done
        rows = self.at_most.block(limits) + np.arange(count)
        self.at_most.put(rows, stock, 1.0)
        # Young at the end of a bucket: arrived before it, and no longer ago than the longest wait.
        until = np.searchsorted(self.edges_s[1:-1], options.begin_s[own] + self.max_wait_s, side="left")
        rank, bucket = _spans(arrives, until)
        self.at_most.put(rows[bucket], own[rank], -work_s[rank])


def _spans(first: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return every (i, k) with first[i] ≤ k < end[i], as two arrays."""
    counts = np.maximum(end - first, 0)
    rank = np.repeat(np.arange(len(first)), counts)
    return rank, np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts) + first[rank]


def _solve(program: _Program) -> float:
    columns, options = program.columns, len(program.options)
    gain = np.zeros(columns)
    gain[:options] = -program.options.value
    upper = np.full(columns, np.inf)
    upper[:options] = 1.0
    found = linprog(
        gain,
        A_ub=program.at_most.matrix(columns),
        b_ub=np.concatenate(program.at_most.limits),
        A_eq=program.equal.matrix(columns) if program.equal.count else None,
        b_eq=np.concatenate(program.equal.limits) if program.equal.count else None,
        bounds=np.column_stack([np.zeros(columns), upper]),
        method="highs-ipm",
    )
    if found.status != 0:
        raise BoundError(f"bound: the solver ended with {found.message!r} over {columns} columns")
    return -float(found.fun)
