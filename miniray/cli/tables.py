"""How the commands print tables: drawn on a terminal, plain columns elsewhere."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from miniray.common.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

#: So many digits of an id are shown.
ID_LENGTH = 8


@dataclasses.dataclass(frozen=True)
class Section:
    """A table with its title, and a line to show in its place when it has no rows."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    empty: str = ""


def draw(headline: str, sections: Iterable[Section], console: Console | None = None) -> None:
    """Print a line and tables.

    Args:
        headline: What stands above all.
        sections: Those without rows and without a line for that are left out.
        console: Where to print; None: stdout.
    """
    if console is None:
        from rich.console import Console

        console = Console()
    draw_one = _draw_rich if console.is_terminal else _draw_plain
    console.print(printable(headline), markup=False, highlight=False, soft_wrap=True)
    for section in sections:
        if section.rows or section.empty:
            rows = [tuple(map(printable, row)) for row in section.rows]
            draw_one(dataclasses.replace(section, rows=rows), console)


def _draw_plain(section: Section, console: Console) -> None:
    lines = ["", f"{section.title}:" if section.rows else section.empty]
    if section.rows:
        table = [section.columns, *section.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(section.columns))]
        lines += [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in table
        ]
    for line in lines:
        console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


def _draw_rich(section: Section, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    if not section.rows:
        console.print(Text(f"\n{section.empty}"))
        return
    table = Table(title=section.title, title_justify="left", title_style="bold")
    for column in section.columns:
        table.add_column(column, overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: names may look like markup
    console.print()
    console.print(table)
