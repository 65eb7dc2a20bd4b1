"""What a terminal shows after some text was written to it."""

from __future__ import annotations

import pyte

COLUMNS, ROWS = 120, 60


def screen(written: str, *, columns: int = COLUMNS, rows: int = ROWS) -> list[str]:
    """The lines, to the last that is not empty.

    Args:
        written: As a terminal gets it: lines end in ``\\r\\n``.
        columns: Width of the terminal.
        rows: Its height; what is scrolled out is not shown.
    """
    terminal = pyte.Screen(columns, rows)
    pyte.Stream(terminal).feed(written)
    lines = [line.rstrip() for line in terminal.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines
