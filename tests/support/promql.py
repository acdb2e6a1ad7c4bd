"""What a PromQL expression asks for, held against what is there: metrics, label names, values that a matcher names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

TARGET = ("instance", "job")
"""Labels that Prometheus gives to everything that it scrapes."""


class Wrong(AssertionError):
    """An expression asks for what is not there."""


@dataclass
class Scraped:
    """What pages of `/metrics` hold.

    Attributes:
        metrics: name of a sample → label name → values that were seen.
        values: label → values that may occur too, though no page has them now.
        recorded: name of a recording rule → its labels.
    """

    metrics: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    values: Mapping[str, set[str]] = field(default_factory=dict)
    recorded: dict[str, set[str]] = field(default_factory=lambda: {"up": set(TARGET)})

    def read(self, page: str) -> None:
        """Add a page."""
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = self.metrics.setdefault(sample.name, {})
                for name, value in sample.labels.items():
                    labels.setdefault(name, set()).add(value)

    def labels_of(self, text: str) -> set[str]:
        """Return the labels of an expression's result; raises `Wrong` where it asks for what is not there."""
        return self._of(promql.parse(text))

    def _of(self, expr: Any) -> set[str]:
        if isinstance(expr, (promql.VectorSelector, promql.MatrixSelector)):
            return self._selected(getattr(expr, "vector_selector", expr))
        if isinstance(expr, promql.AggregateExpr):
            return self._aggregated(expr)
        if isinstance(expr, promql.Call):
            return self._called(expr)
        if isinstance(expr, promql.BinaryExpr):
            return self._joined(expr)
        if isinstance(expr, (promql.ParenExpr, promql.UnaryExpr, promql.SubqueryExpr)):
            return self._of(expr.expr)
        if isinstance(expr, (promql.NumberLiteral, promql.StringLiteral)):
            return set()
        raise Wrong(f"{type(expr).__name__} is not understood")

    def _selected(self, vector: Any) -> set[str]:
        if vector.name in self.recorded:
            known: Mapping[str, set[str] | None] = dict.fromkeys(self.recorded[vector.name])
        elif vector.name in self.metrics:
            known = {**self.metrics[vector.name], **dict.fromkeys(TARGET)}
        else:
            raise Wrong(f"no page has {vector.name}")
        for matcher in vector.matchers.matchers:
            if matcher.name not in known:
                raise Wrong(f"{vector.name} has no label {matcher.name}, but {sorted(known)}")
            seen = known[matcher.name]
            for value in _alternatives(matcher):
                if seen is not None and value not in seen | self.values.get(matcher.name, set()):
                    raise Wrong(f"{vector.name}: {matcher.name} is never {value!r}, but {sorted(seen)}")
        return set(known)

    def _aggregated(self, expr: Any) -> set[str]:
        inner, modifier = self._of(expr.expr), expr.modifier
        if modifier is None:
            return set()
        named = set(modifier.labels)
        if not named <= inner:
            raise Wrong(f"{expr.expr.prettify()} has no {sorted(named - inner)}, but {sorted(inner)}")
        return named if modifier.type == promql.AggModifierType.By else inner - named

    def _called(self, expr: Any) -> set[str]:
        found: set[str] = set()
        for argument in expr.args:
            found |= self._of(argument)
        if expr.func.name == "histogram_quantile":
            if "le" not in found:
                raise Wrong(f"{expr.prettify()}: there is no `le` to take a quantile over")
            found -= {"le"}
        return found

    def _joined(self, expr: Any) -> set[str]:
        sides = [self._of(side) for side in (expr.lhs, expr.rhs) if not _is_scalar(side)]
        if len(sides) == 2 and expr.modifier is None and sides[0] != sides[1]:
            raise Wrong(f"{expr.prettify()}: its sides never match: {sorted(sides[0])} and {sorted(sides[1])}")
        return set().union(*sides)


def _is_scalar(expr: Any) -> bool:
    if isinstance(expr, promql.BinaryExpr):
        return _is_scalar(expr.lhs) and _is_scalar(expr.rhs)
    return isinstance(expr, promql.NumberLiteral) or (isinstance(expr, promql.Call) and expr.func.name == "time")


def _alternatives(matcher: Any) -> Iterable[str]:
    """Values that a matcher names one by one; patterns name none."""
    exact = matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual)
    parts: Sequence[str] = [matcher.value] if exact else matcher.value.split("|")
    return [part for part in parts if exact or part.replace("_", "").replace("-", "").isalnum()]
