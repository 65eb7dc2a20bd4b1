"""Progress bars of workers: which there are, and in which order. Drawn by ``screen``."""

from __future__ import annotations

from typing import NamedTuple


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

    def lines(self) -> list[str]:
        """The latest state of each bar."""
        return list(self._bars.values())
