"""A table for terminals of any width: figures keep their room, and long names and notes have lines of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from router.base.terminal import plain

_MIN_NAME = 12
_INDENT = 4
LIST_EACH = 20
"""So many devices have rows of their own; of more, those that are alike share one."""
_NAMES_EACH = 50
"""So many names stand in a row that devices share."""
_AROUND = 4
"""Lines of a title, the header, the line of those left out, and the cursor."""


@dataclass(frozen=True, slots=True)
class Row:
    """The cells, the name first; `note` goes below them, over the whole width."""

    cells: Sequence[str | Text]
    note: str | Text = ""


@dataclass(slots=True)
class FoldingTable:
    """A renderable.

    Attributes:
        columns: title and width of every column but the first, which takes the room that is left.
        fit: on a terminal, show no more rows than it has lines, and say how many there are.
    """

    first: str
    columns: Sequence[tuple[str, int]]
    rows: Sequence[Row] = field(default_factory=list)
    fit: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = list(self.rows)
        room = options.max_width - sum(width + 1 for _, width in self.columns)
        longest = max((len(row.cells[0]) for row in rows), default=0)
        name = max(_MIN_NAME, min(max(longest, len(self.first)), room))
        if self.fit and console.is_terminal:
            rows = self._fitting(rows, name, console, options.max_width)
        table = self._part(name)
        table.add_row(*(Text(title, style="bold") for title in (self.first, *(title for title, _ in self.columns))))
        for row in rows:
            cells = [as_text(cell) for cell in row.cells]
            if len(cells[0]) > name:  # whole, to be read and copied
                yield table
                yield cells[0]
                table, cells[0] = self._part(name), Text()
            table.add_row(*cells)
            if row.note:
                yield table
                yield Padding(as_text(row.note), (0, 0, 0, _INDENT))
                table = self._part(name)
        yield table
        if len(rows) < len(self.rows):
            yield Text(f"… and {len(self.rows) - len(rows)} more; name some, or a pattern, to see them", style="dim")

    def _part(self, name: int) -> Table:
        table = Table.grid(padding=(0, 1, 0, 0))
        for width in (name, *(width for _, width in self.columns)):
            table.add_column(width=width, overflow="fold")
        return table

    @staticmethod
    def _fitting(rows: list[Row], name: int, console: Console, width: int) -> list[Row]:
        lines = console.size.height - _AROUND
        fitting = []
        for row in rows:
            length = len(row.cells[0])
            lines -= 1 if length <= name else 1 + -(-length // width)
            if row.note:
                lines -= len(as_text(row.note).wrap(console, width - _INDENT))
            if lines < 0:
                break
            fitting.append(row)
        return fitting


def in_groups(rows: Sequence[Row]) -> list[Row]:
    """Return a row for all devices that differ in name and version alone, where there are too many for a screen.

    Args:
        rows: of devices; the second cell behind the name is a version.
    """
    if len(rows) <= LIST_EACH:
        return list(rows)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        rest = (as_text(cell).plain for cell in (row.cells[1], *row.cells[3:], row.note))
        groups.setdefault(tuple(rest), []).append(row)
    return [_group(alike) if len(alike) > 1 else alike[0] for alike in groups.values()]


def _group(alike: Sequence[Row]) -> Row:
    versions = {as_text(row.cells[2]).plain for row in alike}
    names = [as_text(row.cells[0]).plain for row in alike]
    left_out = len(names) - _NAMES_EACH
    more = [f"… and {left_out} more: --json has all"] if left_out > 0 else []
    note = as_text(alike[0].note) + Text("\n" + ", ".join([*names[:_NAMES_EACH], *more]), style="dim")
    version = versions.pop() if len(versions) == 1 else "*"
    return Row((f"{len(alike)} devices", alike[0].cells[1], version, *alike[0].cells[3:]), note)


def as_text(cell: str | Text) -> Text:
    """Return a cell as it is: what devices say is never read as markup."""
    return cell if isinstance(cell, Text) else said(cell)


def said(words: str, style: str = "") -> Text:
    """Return what a device or a tier said, of which a terminal obeys nothing."""
    return Text(plain(words), style=style)
