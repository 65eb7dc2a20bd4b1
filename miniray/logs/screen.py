"""The driver's terminal: lines of workers, and below them progress bars that stay in place.

Only this module keeps what is drawn at the bottom, and for which owner. Bars are below the cursor,
which stays where the driver's own output has left it: so that is above them, and is never erased. A
live display, such as that of a training run, may take the bottom over, and then draws the bars too.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

#: Bars that are shown at once; the others wait until one of them ends.
SHOWN_BARS = 16
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Cursor sequences of VT100: one line down, with scrolling (IND), which keeps the column.
_DOWN = "\x1bD"
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_NEXT_LINE = "\x1b[B\r"
#: Erases what is drawn below the cursor, and right of it.
ERASE_BELOW = "\x1b[J"


class TerminalDisplay(Protocol):
    """Keeps the bottom of the terminal up to date by itself."""

    def print_above(self, lines: Sequence[str], bars: Sequence[str]) -> None:
        """Print lines above itself, and show these bars with itself until the next call."""


class Screen:
    """Writes to the driver's streams of the moment. Thread-safe; no method raises."""

    def __init__(self) -> None:
        # Reentrant, since a signal handler may call shutdown while its thread prints.
        self._lock = threading.RLock()
        self._displays: list[TerminalDisplay] = []
        self._drawn_on: TextIO | None = None  # where bars are drawn

    def show(self, printed: Sequence[tuple[bool, str]], bars: Sequence[str]) -> None:
        """Write lines above the progress bars, and the bars below them.

        Args:
            printed: Lines, and whether each is for stderr.
            bars: The bars from now on. Those beyond the terminal's height are not shown.
        """
        with self._lock:
            if self._displays and self._show_in(self._displays[-1], printed, bars):
                return
            self._erase()
            _print(printed)
            if bars:
                # One place for all bars; both streams are the same terminal when both are one.
                self._drawn_on = next(filter(is_terminal, (stream(True), stream(False))), None)
                if self._drawn_on is not None:
                    write(self._drawn_on, draw(bars, *terminal_size(self._drawn_on)))

    def hand_over(self, display: TerminalDisplay) -> None:
        """Leave the bottom of the terminal to a display until ``take_back``."""
        with self._lock:
            self._erase()
            self._displays.append(display)

    def take_back(self, display: TerminalDisplay) -> None:
        """Note that a display has ended; bars are drawn again when the next one changes."""
        with self._lock:
            self._displays.remove(display)

    def _show_in(
        self,
        display: TerminalDisplay,
        printed: Sequence[tuple[bool, str]],
        bars: Sequence[str],
    ) -> bool:
        """Show bars and lines for the terminal in a live display, and print the other lines."""
        on_terminal = {is_stderr: is_terminal(stream(is_stderr)) for is_stderr in (False, True)}
        try:
            above = [line for is_stderr, line in printed if on_terminal[is_stderr]]
            display.print_above(above, bars[:SHOWN_BARS])
        except Exception:  # the terminal is gone, or a stand-in that may raise anything
            logger.debug("A live display can't show what workers print.", exc_info=True)
            return False
        _print([(is_stderr, line) for is_stderr, line in printed if not on_terminal[is_stderr]])
        return True

    def _erase(self) -> None:
        if self._drawn_on is not None:
            write(self._drawn_on, ERASE_BELOW)  # from where the driver's output ends
            self._drawn_on = None


#: The screen of this process.
SCREEN = Screen()


def stream(is_stderr: bool) -> TextIO | None:
    """Return the stream of this moment: notebooks and test runners replace it."""
    return sys.stderr if is_stderr else sys.stdout


def draw(bars: Sequence[str], width: int, height: int) -> str:
    """Make the text that draws bars below the cursor and leaves the cursor where it is.

    Args:
        bars: A line each.
        width: Columns of the terminal; longer bars are cut, since a wrapped line takes two.
        height: Rows of the terminal.
    """
    most = max(1, min(SHOWN_BARS, height - 1))
    lines = [f"{_NEXT_LINE}{_cut(bar, width - 1)}" for bar in bars[:most]]
    return f"{_DOWN * len(lines)}\x1b[{len(lines)}A{_SAVE}{''.join(lines)}{_RESTORE}"


def _print(printed: Sequence[tuple[bool, str]]) -> None:
    for is_stderr in (False, True):
        text = "".join(f"{line}\n" for to_stderr, line in printed if to_stderr == is_stderr)
        if text:
            write(stream(is_stderr), text)


def _cut(line: str, width: int) -> str:
    """Cut a line to ``width`` columns; some characters, as of Chinese, take two."""
    import unicodedata

    text, left = _ESCAPE.sub("", line), width
    for index, character in enumerate(text):
        left -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if left < 0:
            return text[:index]
    return line


def terminal_size(terminal: TextIO) -> tuple[int, int]:
    """Return the columns and rows of a terminal."""
    try:
        size = os.get_terminal_size(terminal.fileno())
    except Exception:  # it says that it is a terminal, but has no descriptor of one
        logger.debug("The size of the terminal can't be read.", exc_info=True)
        return 80, 24
    return size.columns or 80, size.lines or 24


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream says that it is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except Exception:  # closed, or a stand-in that may raise anything
        logger.debug("A stream can't tell whether it is a terminal.", exc_info=True)
        return False


def write(stream: TextIO | None, text: str) -> None:
    """Write and flush; errors of the stream go to the log.

    Characters that its encoding does not have are written as escapes.
    """
    if stream is None or not text:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except Exception:
        # The stream is the user's and may raise anything; the caller has other things to do.
        logger.debug("A text for the user could not be written.", exc_info=True)


class BarKey(NamedTuple):
    """A bar: those of one stream of one worker are numbered from the top."""

    node: str
    pid: int
    is_stderr: bool
    row: int


class BarRegion:
    """Unfinished bars, in the order in which they appeared."""

    def __init__(self) -> None:
        self._bars: dict[BarKey, str] = {}

    def __bool__(self) -> bool:
        return bool(self._bars)

    def update(self, key: BarKey, line: str) -> None:
        """Show a bar's new state; an empty one removes it."""
        if line:
            self._bars[key] = line
        else:
            self._bars.pop(key, None)

    def finish_row(self, node: str, pid: int, is_stderr: bool) -> None:
        """Remove a worker's top bar, as it has finished a line; the others move up."""
        rows = {
            key.row: self._bars.pop(key)
            for key in list(self._bars)
            if key[:3] == (node, pid, is_stderr)
        }
        for row, line in rows.items():
            if row:
                self._bars[BarKey(node, pid, is_stderr, row - 1)] = line

    def clear(self) -> None:
        self._bars.clear()

    def lines(self) -> list[str]:
        return list(self._bars.values())
