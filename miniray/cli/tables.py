"""How the commands print tables (drawn on a terminal, plain columns elsewhere) and amounts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from miniray.common.names import format_bytes, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import Console, RenderableType

#: Digits of an id that are shown.
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
    if console.is_terminal:
        for each in drawn(headline, sections):
            console.print(each)
        return
    if headline:
        console.print(printable(headline), markup=False, highlight=False, soft_wrap=True)
    for section in _shown(sections):
        _draw_plain(section, console)


def drawn(headline: str, sections: Iterable[Section]) -> Iterator[RenderableType]:
    """Yield what ``draw`` shows on a terminal."""
    from rich.text import Text

    if headline:
        yield Text(printable(headline))
    for section in _shown(sections):
        yield _table(section)


def _shown(sections: Iterable[Section]) -> Iterator[Section]:
    """Yield the non-empty sections, without characters that could steer a terminal."""
    for section in sections:
        if section.rows or section.empty:
            rows = [tuple(map(printable, row)) for row in section.rows]
            yield dataclasses.replace(section, title=printable(section.title), rows=rows)


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


def _table(section: Section) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    if not section.rows:
        return Text(f"\n{section.empty}")
    table = Table(title=f"\n{section.title}", title_justify="left", title_style="bold")
    for column in section.columns:
        table.add_column(column, overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: names may look like markup
    return table


_IN_BYTES = frozenset({"memory", "object_store_memory"})
#: Most looked for first; others follow by name.
_ORDER = {"CPU": 0, "GPU": 1}
#: Every node has its own; it does not show how busy the node is.
_HIDDEN_PREFIX = "node:"


def visible_resources(*amounts: Mapping[str, float]) -> list[str]:
    """Return the resource names worth showing, in the order to show them in."""
    names = {name for mapping in amounts for name in mapping}
    shown = (name for name in names if not name.startswith(_HIDDEN_PREFIX))
    return sorted(shown, key=lambda name: (_ORDER.get(name, 2), name in _IN_BYTES, name))


def format_amount(name: str, amount: float) -> str:
    """Return one amount: ``0.5``, or ``1.5 GiB`` for amounts in bytes."""
    if name in _IN_BYTES:
        return format_bytes(amount)
    return f"{amount:.4f}".rstrip("0").rstrip(".")


def describe_amounts(amounts: Mapping[str, float]) -> str:
    """Write amounts: ``2 CPU, 0.5 GPU, 1.5 GiB memory``."""
    names = visible_resources(amounts)
    return ", ".join(f"{format_amount(name, amounts[name])} {name}" for name in names)


def describe_usage(used: Mapping[str, float], total: Mapping[str, float]) -> str:
    """Write use and totals: ``CPU 2/8, GPU 0.5/2``."""
    return ", ".join(
        f"{name} {format_amount(name, used.get(name, 0))}/{format_amount(name, total.get(name, 0))}"
        for name in visible_resources(total)
    )
