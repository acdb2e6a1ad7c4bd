"""The demo's screen: one line a request while it runs, one table at the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from examples.demo.traffic import Reply

OUTCOME_STYLE = {"completed": "green", "degraded": "yellow", "shed": "magenta", "unavailable": "magenta"}
COLUMNS = "{:>6}  {:<5}  {:<33} {:>9} {:>9} {:>9}  {:<6} {:>4}  {:<11} {}"


@dataclass
class SceneResult:
    """What one scene promised, and what it showed."""

    title: str
    took_s: float = 0.0
    replies: list[Reply] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def check(self, holds: bool, promise: str) -> None:
        """Record a promise that did not hold."""
        if not holds:
            self.failures.append(promise)


class Screen:
    """Prints requests as they end."""

    def __init__(self) -> None:
        # Piped into a file or a CI log there is no width to ask for, and 80 columns fold every line.
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)

    def scene(self, number: int, title: str) -> None:
        self.console.print(f"\n[bold]Scene {number}: {title}[/bold]")
        self.console.print(
            COLUMNS.format(
                "prompt", "tier", "model", "predicted", "TTFT", "took", "finish", "out", "outcome", "reason"
            ),
            style="dim",
        )

    def note(self, text: str) -> None:
        self.console.print(f"  · {text}", style="cyan", markup=False)

    def reply(self, reply: Reply) -> None:
        detail = reply.reason
        if reply.retry_after_s is not None:
            detail += f" · retry after {reply.retry_after_s:.1f} s"
        if reply.outcome in {"failed", "invalid"}:
            detail += f" {reply.error}"
        line = COLUMNS.format(
            reply.prompt_tokens or "–",
            reply.tier or "–",
            (reply.variant + (f" (rung {reply.rung})" if reply.rung else "")) or "–",
            _milliseconds(reply.predicted_ttft_ms),
            _milliseconds(reply.ttft_ms),
            _milliseconds(reply.e2e_ms) if reply.served else "–",
            reply.finish or "–",
            reply.completion_tokens or "–",
            reply.outcome,
            detail.strip(),
        )
        self.console.print(line, style=OUTCOME_STYLE.get(reply.outcome, "bold red"), markup=False)

    def verdict(self, result: SceneResult) -> None:
        for fact in result.facts:
            self.note(fact)
        for failure in result.failures:
            self.console.print(f"  ✗ {failure}", style="bold red", markup=False)
        if not result.failures:
            self.console.print("  ✓ kept", style="bold green")

    def summary(self, results: Sequence[SceneResult], took_s: float) -> None:
        table = Table(title=f"Overspill demo: {len(results)} scenes in {took_s:.0f} s")
        for column in ("#", "scene", "requests", "outcomes", "edge / cloud", "TTFT p50", "took", "promise"):
            table.add_column(column, justify="right" if column in {"#", "requests", "TTFT p50", "took"} else "left")
        for number, result in enumerate(results, 1):
            outcomes = Counter(reply.outcome for reply in result.replies)
            tiers = Counter(reply.tier for reply in result.replies if reply.served)
            waits = sorted(reply.ttft_ms for reply in result.replies if reply.ttft_ms is not None)
            table.add_row(
                str(number),
                result.title,
                str(len(result.replies)),
                ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()),
                f"{tiers['edge']} / {tiers['cloud']}",
                _milliseconds(waits[len(waits) // 2] if waits else None),
                f"{result.took_s:.1f} s",
                "[green]kept[/green]" if not result.failures else f"[red]{len(result.failures)} not kept[/red]",
            )
        self.console.print()
        self.console.print(table)


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms"
