"""Progress bars of workers at the bottom of the driver's terminal.

Knows which bars there are and the escape sequences that draw and erase them.
Writes nothing itself.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: So many bars are shown at once; the others wait until one of them ends.
_SHOWN_BARS = 16
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class BarKey(NamedTuple):
    """Which bar: those of one stream of one worker are numbered from the top."""

    node: str
    pid: int
    is_stderr: bool
    row: int


class BarRegion:
    """The bars that are unfinished, in the order in which they appeared."""

    def __init__(self) -> None:
        self._bars: dict[BarKey, str] = {}
        self._drawn = 0  # lines of the terminal that hold bars

    def __bool__(self) -> bool:
        return bool(self._bars)

    def update(self, key: BarKey, line: str) -> None:
        """A bar has a new state; an empty one is a bar that cleared itself."""
        if line:
            self._bars[key] = line
        else:
            self._bars.pop(key, None)

    def finish_row(self, node: str, pid: int, is_stderr: bool) -> None:
        """A worker has finished a line: its top bar, if any, is gone and the others move up."""
        rows = {
            key.row: self._bars.pop(key)
            for key in list(self._bars)
            if key[:3] == (node, pid, is_stderr)
        }
        for row, line in rows.items():
            if row:
                self._bars[BarKey(node, pid, is_stderr, row - 1)] = line

    def clear(self) -> None:
        """Forget all bars."""
        self._bars.clear()

    def erase(self) -> str:
        """What removes the drawn bars and leaves the cursor where the first began."""
        drawn, self._drawn = self._drawn, 0
        if not drawn:
            return ""
        return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (drawn - 1)

    def draw(self, width: int, height: int) -> str:
        """What draws the bars, the cursor staying in the last one.

        Args:
            width: Columns of the terminal; longer bars are cut, since a wrapped line can't
                be erased.
            height: Rows of the terminal.
        """
        room = max(1, min(_SHOWN_BARS, height - 1))
        lines = [_cut(line, width - 1) for line in list(self._bars.values())[:room]]
        self._drawn = len(lines)
        return "\n".join(lines)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else _ESCAPE.sub("", line)[:width]
