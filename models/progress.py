"""How the toolchain's progress looks on a terminal, and in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from models.graph.artifact import Note


class Bars:
    """Shows downloads as progress bars; a `models.store.fetch.Progress`."""

    def __init__(self, shown: bars.Progress) -> None:
        self._shown = shown
        self._task: bars.TaskID | None = None

    def begin(self, name: str, total_bytes: int | None) -> None:
        if self._task is not None:
            self._shown.remove_task(self._task)
        self._task = self._shown.add_task(escape(name), total=total_bytes)

    def reach(self, done_bytes: int) -> None:
        if self._task is not None:
            self._shown.update(self._task, completed=done_bytes)

    def note(self, message: str) -> None:
        self._shown.console.print(f"[yellow]{escape(message)}[/]", soft_wrap=True)


@contextmanager
def watching(console: Console) -> Iterator[Bars]:
    """Show downloads while the block runs."""
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as shown:
        yield Bars(shown)


@contextmanager
def noting(console: Console) -> Iterator[Note]:
    """Show the toolchain's steps: the current one spins on a terminal, each is a line elsewhere."""
    if not console.is_terminal:
        yield lambda line: console.print(escape(line), soft_wrap=True)
        return
    with console.status("starting") as status:
        yield lambda line: status.update(escape(line))
