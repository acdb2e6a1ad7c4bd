"""How long answers become, learnt as survival: running, cut and finished answers all count for what they show.

Each table holds a discrete hazard over the bins of `router.values.length`: of the answers that reached a bin, how many
ended in it,

    h_k = (events_k + κ · h_k of the parent) / (at risk_k + κ),        survival(1.1^k) = Π_{i < k} (1 − h_i)

the Kaplan-Meier estimate (Kaplan and Meier, 1958) held by a parent while little was seen. An answer that was cut, or
still runs, is at risk in the bins that it crossed and has no event: that is all that it shows.

What a request tells of its length are several tables at once: one for all requests of its model, and one each for its
deadline, its prompt's length, its caller, its session, its stop strings; two more count tokens in units of its deadline
and of its cap. Which of them to believe is learnt as well: their survival curves are mixed with weights
exp(decayed sum of log-likelihoods), each answer judged by the curves before they learnt from it (Dawid, 1984).
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.values.length import BINS, EDGES, RATIO, LengthCurve, position_of
from router.values.request import InferenceRequest

Curve = NDArray[np.float64]

_ROOT_WEIGHT: Final = 6.0
_CHILD_WEIGHT: Final = 4.0
_PRIOR_SIGMA: Final = 1.0
_FORGET: Final = 0.999  # of a table, at each answer that ends: lengths drift over days, not minutes
# Of those who wait, what is believed is mixed anew after so many more answers: their share, and at least their number.
_STANDS_TO: Final = 1.25
_STANDS_FOR: Final = 4.0
_JUDGED: Final = 0.98  # of the sums of log-likelihoods, at each answer
_MAX_REGRET: Final = 12.0  # log-likelihood by which a table may fall behind: it comes back within a hundred answers
_TABLES_KEPT: Final = 512  # of one kind
_LEAST_SURVIVAL: Final = 1e-9
_TOLD_EACH: Final = 8  # tokens: the bins of the first ones are narrower than anybody needs to know of a running answer
_FEW_BINS: Final = 6  # numpy takes as long to add to one as to a hundred
_STALE_CHANGES: Final = 4  # a curve is computed again after one ended answer, or so many bins crossed
_UNIT_POSITION: Final = 60.0  # of a second to the deadline, and of a cap, on the axis of the tables that count in them
_DEADLINE_STEP: Final = math.log(1.2)
_PROMPT_STEP: Final = math.log(1.6)

_AXIS = np.arange(BINS, dtype=np.float64)
_ONES, _FORGETS = np.ones(BINS), np.full(BINS, _FORGET)  # an array and a number take numpy twice as long as two arrays
_ONES_BUT_LAST, _CHILD_WEIGHTS = _ONES[:-1], np.full(BINS, _CHILD_WEIGHT)


class _Scratch:
    """Room to compute in, shared by all tables of a model: numpy takes longer to make an array, or a view, than to add.

    Attributes:
        bins, more: one number a bin; but_last: of `bins`.
        shifted: 1, then one number for each bin but the last; tail: those.
    """

    __slots__ = ("bins", "but_last", "more", "shifted", "tail")

    def __init__(self) -> None:
        self.bins: Curve = np.empty(BINS)
        self.but_last: Curve = self.bins[:-1]
        self.more: Curve = np.empty(BINS)
        self.shifted: Curve = np.ones(BINS)
        self.tail: Curve = self.shifted[1:]


class _Table:
    """Events and answers at risk over the bins; its survival is computed when it is asked for after a change.

    Args:
        parent: holds its hazard while little was seen; None for a table that begins with `hazard` by itself.
    """

    __slots__ = (
        "_fresh",
        "_held",
        "_held_at",
        "_scratch",
        "_survival",
        "at_risk",
        "cells",
        "changes",
        "events",
        "parent",
    )

    def __init__(self, scratch: _Scratch, parent: _Table | None, hazard: Curve | None = None) -> None:
        self.parent = parent
        self.cells = array("d", bytes(8 * BINS))
        self.at_risk: Curve = np.frombuffer(self.cells)
        self.events: Curve = np.zeros(BINS)
        if hazard is not None:
            self.at_risk += _ROOT_WEIGHT
            self.events += _ROOT_WEIGHT * hazard
        self.changes = 0
        self._scratch = scratch
        self._survival: Curve | None = None
        self._fresh = 0
        self._held: Curve = np.empty(BINS)
        self._held_at = -1

    def held(self) -> Curve:
        """Return events that hold a child's hazard at this table's own: all children ask for them."""
        if self._held_at != self.changes:
            self._held_at = self.changes
            np.divide(self.events, self.at_risk, self._held)
            np.multiply(_CHILD_WEIGHTS, self._held, self._held)
        return self._held

    def survival(self) -> Curve:
        """P(length > the upper edge of bin k − 1), that is of edge k; the first is 1."""
        parent = self.parent
        seen = self.changes if parent is None else self.changes + parent.changes // 8
        if self._survival is None or seen - self._fresh >= _STALE_CHANGES:
            scratch = self._scratch
            hazard = scratch.bins
            if parent is None:
                np.divide(self.events, self.at_risk, hazard)
            else:
                np.add(self.events, parent.held(), hazard)
                np.divide(hazard, np.add(self.at_risk, _CHILD_WEIGHTS, scratch.more), hazard)
            np.subtract(_ONES_BUT_LAST, scratch.but_last, scratch.tail)
            self._survival, self._fresh = np.multiply.accumulate(scratch.shifted), seen
        return self._survival

    def crossed(self, first: int, last: int) -> None:
        """An answer was at risk in bins first … last − 1 and went on."""
        self.changes += 1
        if last - first > _FEW_BINS:
            self.at_risk[first:last] += 1.0
            return
        cells = self.cells
        for bin_ in range(first, last):
            cells[bin_] = cells[bin_] + 1.0  # compiled, `+=` would add objects rather than numbers

    def ended(self, bin_: int) -> None:
        np.multiply(self.at_risk, _FORGETS, self.at_risk)
        np.multiply(self.events, _FORGETS, self.events)
        self.cells[bin_] += 1.0
        self.events[bin_] += 1.0
        self.changes += _STALE_CHANGES


class _Source:
    """One table that speaks for a request, and where the request's first token lies on its axis, in bins.

    Attributes:
        said: its survival at the request's own edges, before it learnt from this answer.
        seen: the bin up to which the answer is at risk in the table.
    """

    __slots__ = ("kind", "said", "seen", "shift", "table")

    def __init__(self, kind: str, table: _Table, shift: float = 0.0) -> None:
        self.kind = kind
        self.table = table
        self.shift = shift
        self.seen = 0
        curve = table.survival()
        self.said: Curve = curve if shift == 0.0 else np.interp(_AXIS + shift, _AXIS, curve)

    def bin_at(self, position: float) -> int:
        """Return the bin of a length that lies there on the request's own axis; see `position_of`."""
        bin_ = int(position + self.shift)
        return 0 if bin_ < 0 else bin_ if bin_ < BINS else BINS - 1


class LengthWatch:
    """One answer as it grows; what it has shown so far is in the tables.

    Attributes:
        told_tokens: how many it had when the tables were told of it last; next_tokens: when they are told of it again.
        longest: 0.9 quantile of its length.
        stands_to: of how many answers of the model this is believed.
    """

    __slots__ = ("cap", "curve", "longest", "next_tokens", "sources", "stands_to", "told_tokens")

    def __init__(self, sources: list[_Source], curve: LengthCurve, cap: int | None, stands_to: float) -> None:
        self.cap = cap
        self.told_tokens = 0
        self.next_tokens = 1.0
        self.believe(sources, curve, stands_to)

    def believe(self, sources: list[_Source], curve: LengthCurve, stands_to: float) -> None:
        """Take what is believed from now on; nothing was told of the answer yet."""
        self.sources, self.curve, self.stands_to = sources, curve, stands_to
        self.longest = max(1, round(curve.quantile(0.9)))


@dataclass(slots=True)
class _Family:
    root: _Table
    tables: dict[str, OrderedDict[object, _Table]] = field(default_factory=dict)
    merits: dict[str, float] = field(default_factory=dict)
    ended: int = 0


class LengthModel:
    """Survival of answer lengths by model and class of request. One writer, the dispatcher.

    Args:
        expected_tokens: median of the prior, which is log-normal with σ = 1.
    """

    def __init__(self, expected_tokens: float) -> None:
        self.expected_tokens = expected_tokens
        self._families: dict[str, _Family] = {}
        self._scratch = _Scratch()

    def watch(self, request: InferenceRequest, family: str) -> LengthWatch:
        """Return what is believed of the length of `request`'s whole answer, to be told how it goes on."""
        cap = request.sampling.max_tokens
        if cap == 1:  # calls whose answer is one value; it tells nothing of the lengths of others
            return LengthWatch([], _ONE_TOKEN, cap, math.inf)
        if cap is not None and request.sampling.ignore_eos:
            return LengthWatch([], LengthCurve.exactly(cap), cap, math.inf)
        sources, curve = self._believed(request, family)
        return LengthWatch(sources, curve, cap, self._stands_to(family))

    def renew(self, watch: LengthWatch, request: InferenceRequest, family: str) -> None:
        """Let one who still waits know what was learnt since: of a new model, or after a change, that is much."""
        if self._family(family).ended > watch.stands_to:
            sources, curve = self._believed(request, family)
            watch.believe(sources, curve, self._stands_to(family))

    def _stands_to(self, family: str) -> float:
        return _STANDS_TO * self._family(family).ended + _STANDS_FOR

    def _believed(self, request: InferenceRequest, family: str) -> tuple[list[_Source], LengthCurve]:
        known, cap = self._family(family), request.sampling.max_tokens
        sources = self._sources(known, request)
        merits = [known.merits.get(source.kind, 0.0) for source in sources]
        best, whole = max(merits), 0.0
        weights = [math.exp(merit - best) for merit in merits]
        for weight in weights:
            whole += weight
        mixed = np.array(weights).dot(np.array([source.said for source in sources]))
        np.divide(mixed, whole, mixed)
        return sources, _curve(mixed, math.inf if cap is None else float(cap), self._scratch)

    def grew(self, watch: LengthWatch, tokens: int) -> None:
        """An answer has `tokens` tokens and goes on. Cheap before `watch.next_tokens`."""
        if tokens >= watch.next_tokens:
            _cross(watch, tokens)

    def ended(self, watch: LengthWatch, family: str, tokens: int, *, by_itself: bool) -> None:
        """An answer ended.

        Args:
            by_itself: the model ended it; else it was cut, by a cap, its deadline, its caller or a failure.
        """
        tokens = max(tokens, 1)
        at_cap = watch.cap is not None and tokens >= watch.cap
        known, position = self._family(family), position_of(tokens)
        known.ended += 1
        if tokens >= watch.told_tokens * RATIO:  # else it came no further than a bin
            _cross(watch, tokens)
        k = min(int(position), BINS - 2)
        for source in watch.sources:
            whole = by_itself or (at_cap and source.kind == "cap")
            self._judge(known.merits, source, k, whole=whole)
            if whole:
                source.table.ended(source.bin_at(position))

    @staticmethod
    def settle(watch: LengthWatch) -> None:
        """Compute what an ended answer has changed: who comes next, and asks for the same, does not wait for that."""
        for source in watch.sources:
            source.table.survival()

    @staticmethod
    def _judge(merits: dict[str, float], source: _Source, k: int, *, whole: bool) -> None:
        """Add to a kind's log-likelihood what its curve, before it learnt, said of an answer that came to bin `k`."""
        survival, kind = source.said, source.kind
        likelihood = survival.item(k)
        if whole:
            likelihood -= survival.item(k + 1)
        merits[kind] = _JUDGED * merits.get(kind, 0.0) + math.log(max(likelihood, _LEAST_SURVIVAL))
        best = max(merits.values())
        merits[kind] = max(merits[kind], best - _MAX_REGRET)

    def _family(self, name: str) -> _Family:
        known = self._families.get(name)
        if known is None:
            known = self._families[name] = _Family(
                _Table(self._scratch, None, _log_normal_hazard(self.expected_tokens))
            )
        return known

    def _sources(self, known: _Family, request: InferenceRequest) -> list[_Source]:
        objective, cap = request.objective, request.sampling.max_tokens
        sources = [_Source("all", known.root)]

        def add(kind: str, key: object, shift: float = 0.0, parent: _Table | None = known.root) -> None:
            sources.append(_Source(kind, self._table(known, kind, key, parent), shift))

        add("prompt", int(math.log(max(request.prompt_tokens, 1)) / _PROMPT_STEP))
        if objective.deadline_s is not None:
            add("deadline", int(math.log(max(objective.deadline_s, 1e-3)) / _DEADLINE_STEP))
            add("deadline-share", None, _UNIT_POSITION - position_of(max(objective.deadline_s * 16.0, 1.0)), None)
        if cap is not None:
            add("cap", None, _UNIT_POSITION - position_of(cap), None)
        if request.caller:
            add("caller", request.caller)
        if objective.session is not None:
            add("session", (request.caller, objective.session))
        if request.sampling.stop:
            add("stop", request.sampling.stop)
        return sources

    def _table(self, known: _Family, kind: str, key: object, parent: _Table | None) -> _Table:
        """The table of a kind and key; the one not used for longest gives way to a new one."""
        tables = known.tables.setdefault(kind, OrderedDict())
        table = tables.get(key)
        if table is None:
            hazard = None if parent is not None else _flat_hazard()
            table = tables[key] = _Table(self._scratch, parent, hazard)
            if len(tables) > _TABLES_KEPT:
                tables.popitem(last=False)
        tables.move_to_end(key)
        return table


def _cross(watch: LengthWatch, tokens: int) -> None:
    """Note the bins that an answer has crossed since it was told of last."""
    watch.told_tokens, watch.next_tokens = tokens, max(tokens * RATIO, tokens + _TOLD_EACH)
    position = position_of(tokens)
    own = min(int(position), BINS - 1)
    for source in watch.sources:
        bin_, seen = own if source.shift == 0.0 else source.bin_at(position), source.seen
        if bin_ > seen:
            source.table.crossed(seen, bin_)
            source.seen = bin_


def _curve(survival: Curve, cap: float, scratch: _Scratch) -> LengthCurve:
    steps = np.add(survival[:-1], survival[1:], scratch.but_last)
    np.multiply(steps, _HALF_WIDTHS, steps)
    np.add.accumulate(steps, 0, None, steps)
    np.add(_ONES_BUT_LAST, steps, scratch.tail)
    return LengthCurve(array("d", survival.tobytes()), array("d", scratch.shifted.tobytes()), cap)


_ONE_TOKEN = LengthCurve.exactly(1)
_HALF_WIDTHS = 0.5 * np.diff(np.array(EDGES))


def _log_normal_hazard(median: float) -> Curve:
    edges = np.array([*EDGES, EDGES[-1] * RATIO])
    z = (np.log(edges) - math.log(max(median, 1.0))) / _PRIOR_SIGMA
    survival = 0.5 * np.array([math.erfc(value / math.sqrt(2.0)) for value in z])
    survival = np.maximum(survival, _LEAST_SURVIVAL)
    hazard: Curve = np.clip(1.0 - survival[1:] / survival[:-1], 1e-4, 0.9)
    return hazard


def _flat_hazard() -> Curve:
    """Prior of the tables that count in units of the request: wide around two thirds of the unit."""
    edges = np.arange(BINS + 1, dtype=np.float64)
    z = (edges - _UNIT_POSITION + 4.0) * math.log(RATIO)
    survival = np.maximum(0.5 * np.array([math.erfc(value / math.sqrt(2.0)) for value in z]), _LEAST_SURVIVAL)
    hazard: Curve = np.clip(1.0 - survival[1:] / survival[:-1], 1e-4, 0.9)
    return hazard
