r"""Splits what a worker writes into lines, each under the name of the call that was running.

Pure: bytes in, lines out. A mark ``\0miniray:name=<number>:<name>\0``, which the worker
writes (``worker/stdio.py``), names what follows it; the number says how often the name has
changed. Progress bars redraw a line; of many states that arrive together only the latest counts.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

MARK_START = b"\0miniray:name="
MARK_END = b"\0"
#: A line that is longer is passed on in pieces of this many bytes.
MAX_LINE = 64 * 1024
#: A mark that does not end within this many bytes is not a mark.
_MAX_MARK = 4096
_CURSOR_UP = b"\x1b[A"
#: Bars below each other that are followed.
_MAX_BARS = 16


class LogLine(NamedTuple):
    """A line of output.

    A state of a line that is still being redrawn ends in carriage returns: one if the
    line is the lowest that is unfinished, two for the one below it, and so on (see
    ``bar_row``). A finished line holds no line end.
    """

    name: str  # of the task or actor that wrote it; "" before the first mark
    text: str


def bar_row(text: str) -> int | None:
    """Return which unfinished line a text is a state of (0: the first); None if finished."""
    returns = len(text) - len(text.rstrip("\r"))
    return returns - 1 if returns else None


def clean_name(name: str) -> str:
    """Return a name as it can stand in a mark: on one line, and not too long."""
    name = name[:256]
    return name if name.isprintable() else "".join(c if c.isprintable() else " " for c in name)


def mark(number: int, name: bytes) -> bytes:
    """Return the mark that gives what follows a name, which is a clean one."""
    return b"%b%d:%b%b" % (MARK_START, number, name, MARK_END)


class LineSplitter:
    """Splits one stream of one worker."""

    def __init__(self) -> None:
        self._name = ""
        self._number = 0
        self._unparsed = b""  # what may be the beginning of a mark or of a cursor movement
        # Lines that are not finished. There is more than one only from a progress bar on,
        # since the cursor may move up to it again; it is in self._rows[self._row].
        self._rows = [_Row()]
        self._row = 0
        self._touched = False  # the row was written to since the cursor came to it
        self._blank = 0  # empty lines: if a bar follows, the way down to where it is drawn

    def feed(self, data: bytes, number: int = 0, name: str = "") -> list[LogLine]:
        """Return the lines that these bytes finish, and the latest states of progress bars.

        Args:
            data: What was read.
            number: Of the name under which it was written, unless a mark in the stream names a
                later one.
            name: That name.
        """
        lines: list[LogLine] = []
        if number > self._number:
            rest, self._unparsed = self._unparsed, b""
            self._write(rest, lines)
            self._rename(number, name, lines)
        data = self._unparsed + data
        used = self._parse(data, lines)
        self._unparsed = data[used:]
        self._emit_states(lines)
        return lines

    @property
    def named(self) -> tuple[int, str]:
        """The number and the name that were read last."""
        return self._number, self._name

    @property
    def unsettled(self) -> bool:
        """Whether a bar has ended its line, or empty lines have come, but bars below may follow.

        Call ``settle`` after a silence of some tenths of a second.
        """
        return self._row > 0 or self._blank > 0

    def settle(self) -> list[LogLine]:
        """Return the lines above the cursor: without further output they are finished."""
        lines: list[LogLine] = []
        self._emit_blank(lines)
        if self._row:
            self._drop_left_bars(lines)
            self._emit_finished(lines)
        return lines

    def close(self) -> list[LogLine]:
        """Return what is left when the stream has ended."""
        lines: list[LogLine] = []
        rest, self._unparsed = self._unparsed, b""
        self._write(rest, lines)
        self._finish(lines)
        return lines

    def _parse(self, data: bytes, lines: list[LogLine]) -> int:
        """Write data and obey its marks; returns where an unfinished sequence begins."""
        written = at = 0
        while (start := data.find(b"\0", at)) >= 0:
            end = data.find(MARK_END, start + 1, start + _MAX_MARK)
            number, colon, name = data[start + len(MARK_START) : max(end, 0)].partition(b":")
            if data.startswith(MARK_START, start) and colon and number.isdigit():
                self._write(data[written:start], lines)
                self._rename(int(number), name.decode(errors="replace"), lines)
                written = at = end + 1
            elif end < 0 and _may_become_mark(data[start : start + _MAX_MARK]):
                self._write(data[written:start], lines)
                return start
            else:
                at = start + 1
        used = len(data) - _cursor_up_begun(data)
        self._write(data[written:used], lines)
        return used

    def _rename(self, number: int, name: str, lines: list[LogLine]) -> None:
        """Note that what follows was written under another name."""
        self._finish(lines)
        self._number, self._name = number, name

    def _write(self, data: bytes, lines: list[LogLine]) -> None:
        """Move the cursor and write as a terminal would, as far as progress bars need it."""
        for number, part in enumerate(data.split(b"\n")):
            if number:
                self._new_line(lines)
            for index, piece in enumerate(part.split(_CURSOR_UP)):
                if index:
                    self._move_up()
                if piece:
                    self._append(piece, lines)

    def _move_up(self) -> None:
        if self._row:
            self._row -= 1
        elif self._rows[0].is_bar and len(self._rows) < _MAX_BARS:
            # To a line that was passed on already: as if it were an empty one above the bar.
            self._rows.insert(0, _Row())
            for row in self._rows:
                row.changed = True  # each is one lower than it was sent
        self._rows[self._row].pass_by()
        self._touched = False

    def _new_line(self, lines: list[LogLine]) -> None:
        if self._touched or self._row >= _MAX_BARS:
            # A bar that had others below it would have moved back up after it drew one.
            self._emit_finished(lines)
        self._touched = False
        if self._row == 0 and not self._rows[0].is_bar:
            row = self._rows.pop(0)
            if row.text or self._blank >= _MAX_BARS:
                self._emit_blank(lines)
                lines.append(LogLine(self._name, row.shown()))
            else:
                self._blank += 1
        else:
            self._row += 1
        if self._row == len(self._rows):
            self._rows.append(_Row())
        else:
            self._rows[self._row].overwrite()

    def _append(self, data: bytes, lines: list[LogLine]) -> None:
        if self._blank and data[:1] == b"\r" and data.strip(b"\r"):
            self._rows[:0] = [_Row() for _ in range(self._blank)]
            self._row += self._blank
            self._blank = 0
        self._emit_blank(lines)
        row = self._rows[self._row]
        redrawn = row.write(data)
        if self._row and ((redrawn and self._touched) or not row.is_bar):
            # As above: bars below others are left after they were drawn, and plain text
            # does not come between bars.
            self._emit_finished(lines)
        self._touched |= bool(data.strip(b"\r"))
        while len(row.text) > MAX_LINE:
            self._emit_finished(lines)
            cut = _character_boundary(row.text, MAX_LINE)
            lines.append(LogLine(self._name, _decoded(row.text[:cut])))
            row.text = row.text[cut:]

    def _emit_finished(self, lines: list[LogLine]) -> None:
        """Emit the lines above the cursor, which are finished."""
        above = self._rows[: self._row]
        if any(row.is_gap for row in above):
            # No line is passed on for a gap, so that the rows would be numbered otherwise then.
            for number, row in enumerate(self._rows):
                self._emit_cleared(number, row, lines)
        lines.extend(LogLine(self._name, row.shown()) for row in above if not row.is_gap)
        del self._rows[: self._row]
        self._row = 0

    def _emit_blank(self, lines: list[LogLine]) -> None:
        """Emit empty lines that were no way to a bar."""
        lines.extend(LogLine(self._name, "") for _ in range(self._blank))
        self._blank = 0

    def _emit_cleared(self, number: int, row: _Row, lines: list[LogLine]) -> None:
        """Forget the bar of this row; its state is emitted again where it is shown again."""
        if row.is_bar:
            lines.append(LogLine(self._name, "\r" * (number + 1)))
            row.changed = True

    def _drop_left_bars(self, lines: list[LogLine]) -> None:
        """Forget old states below a line that has ended.

        A bar below others shows its last state in the uppermost line when it ends, and leaves
        what it drew before. In a terminal the next output overwrites that.
        """
        if not self._rows[self._row].is_overwritten:
            return
        for number in range(self._row, len(self._rows)):
            self._emit_cleared(number, self._rows[number], lines)
        self._rows[self._row :] = [_Row()]

    def _emit_states(self, lines: list[LogLine]) -> None:
        for number, row in enumerate(self._rows):
            if row.is_bar and row.changed:
                row.changed = False
                lines.append(LogLine(self._name, row.shown() + "\r" * (number + 1)))

    def _finish(self, lines: list[LogLine]) -> None:
        """Emit the rest, with or without a line end."""
        self._emit_blank(lines)
        self._drop_left_bars(lines)
        while self._rows and not self._rows[-1].shown():
            self._rows.pop()
        self._row = len(self._rows)
        self._emit_finished(lines)
        self._rows = [_Row()]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Row:
    """A line that is not finished."""

    text: bytes = b""
    is_bar: bool = False  # it was redrawn at least once
    is_gap: bool = False  # nothing was written to it, it is only above a bar
    changed: bool = False  # since its state was last passed on
    is_overwritten: bool = False  # the cursor came from above, so what follows replaces it
    _returned: bool = False  # a carriage return came last, so what follows redraws the line

    def write(self, data: bytes) -> bool:
        """Write at the cursor; returns whether that redraws the line from its beginning."""
        # A trailing return may belong to a line end, or the next state is yet to come.
        body = data.rstrip(b"\r")
        if not body:
            self._returned = True
            return False
        states = body.split(b"\r")
        redrawn = self._returned or len(states) > 1
        if self.is_gap:
            self.is_gap = self.is_bar = False
        if redrawn or self.is_overwritten:
            before = states[-2] if len(states) > 1 else self.text
            # A bar that covers itself with spaces is gone; what follows is plain text.
            self.is_bar = redrawn and not before.isspace()
            self.text = b""
        self.text += states[-1]
        self.changed = True
        self.is_overwritten = False
        self._returned = len(body) < len(data)
        return redrawn

    def overwrite(self) -> None:
        """Move the cursor to the beginning of the line."""
        self.is_overwritten = True
        self._returned = False

    def pass_by(self) -> None:
        """Note that the cursor has come back from a line below."""
        if not self.text:
            self.is_bar = self.is_gap = True

    def shown(self) -> str:
        """Return the text, without what a bar writes only to cover its earlier states."""
        return _decoded(self.text.rstrip(b" ") if self.is_bar else self.text)


def _may_become_mark(data: bytes) -> bool:
    """Return whether data that begins with NUL may be the first part of a mark."""
    if len(data) >= _MAX_MARK:
        return False
    return data.startswith(MARK_START) or MARK_START.startswith(data)


def _cursor_up_begun(data: bytes) -> int:
    """Return how many bytes at the end of data may be the first part of a cursor movement."""
    return next((n for n in (2, 1) if data.endswith(_CURSOR_UP[:n])), 0)


def _character_boundary(text: bytes, limit: int) -> int:
    """Return the last place up to ``limit`` where UTF-8 text can be cut."""
    for cut in range(limit, limit - 4, -1):
        if text[cut] & 0xC0 != 0x80:
            return cut
    return limit


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")
