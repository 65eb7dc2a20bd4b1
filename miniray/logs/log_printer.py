"""What a driver prints of its workers' output and of the head's warnings, in a thread of its own.

Each line gets a prefix that says who wrote it. ``LogDeduplicator`` decides what is folded, which
lines of a trace never are: they come in one piece. ``LogThread`` keeps the order, bounds what
waits, and prints the rest at the end; a paused terminal holds up its thread only. Bars, and how the
terminal is written to, are in ``screen.py``.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import queue
import re
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.config import config
from miniray.common.log_lines import bar_row
from miniray.common.names import printable
from miniray.logs.screen import SCREEN, BarKey, BarRegion, is_terminal, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

#: Prefixes alternate between these (magenta, cyan, yellow, blue and their bright forms).
_COLOURS = (35, 36, 33, 34, 95, 96, 93, 94)
_COUNT_COLOUR = 32
_HINT = " (MINIRAY_DEDUP_LOGS=0 prints every line)"
#: More lines than this, and longer ones, are not followed at once; they are all printed.
_MAX_LINES = 10_000
_MAX_LENGTH = 2_000
_NUMBER = re.compile(r"\d+")

_TRACEBACK = "Traceback (most recent call last)"
_FATAL = "Fatal Python error: "
#: Between two tracebacks of a chain.
_CHAINED = ("During handling of the above", "The above exception was")
#: How lines of a fatal error begin that are not indented; the last of them is its last line.
_OF_FATAL = ("Current thread", "Thread 0x", "Python runtime state", "Stack (", "Extension modules")
#: Streams whose traces are followed at once.
_MOST_TRACES = 1000
#: Seconds, and lines, for which a trace waits for its end.
_TRACE_WAIT = 0.2
_TRACE_LINES = 1000
#: Characters that may wait to be printed; output beyond that is left out.
_LIMIT = 64 * 1024 * 1024
#: Log files with lines that were left out, at most, that a note names.
_NAMED_FILES = 4
#: What a line takes beside its characters.
_LINE_COST = 64


class _Source(NamedTuple):
    """A worker under the name it has at the moment."""

    node: str
    pid: int
    name: str


@dataclasses.dataclass(eq=False, repr=False)
class Repeated:
    """A line that several workers write."""

    text: str
    since: float
    sources: set[_Source]  # all who wrote it
    last: _Source
    count: int = 0  # how many were held back


@dataclasses.dataclass(eq=False, repr=False)
class LogDeduplicator:
    """Folds the lines of one stream (stdout or stderr) of all workers."""

    #: Seconds over which equal lines are folded.
    window: float
    #: Take lines that differ in numbers only for equal.
    numbers: bool = False
    #: By what equal lines have in common, in the order of their times.
    _lines: dict[str, Repeated] = dataclasses.field(default_factory=dict, init=False)

    def admit(self, source: _Source, text: str, now: float) -> bool:
        """Return whether a line is printed now; otherwise it is counted.

        Args:
            source: The worker that wrote it. What one worker repeats is printed.
            text: The line.
            now: The time, in seconds.
        """
        if not text.strip() or len(text) > _MAX_LENGTH:
            return True
        key = _NUMBER.sub("0", text) if self.numbers else text
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) < _MAX_LINES:
                self._lines[key] = Repeated(text, now, {source}, source)
            return True
        line.sources.add(source)
        if len(line.sources) == 1:
            return True
        line.last, line.text = source, text
        line.count += 1
        return False

    def due(self, now: float) -> list[Repeated]:
        """Return held-back lines whose window has passed; forget lines that came once."""
        ready: list[Repeated] = []
        while self._lines:
            key, line = next(iter(self._lines.items()))
            if now - line.since < self.window:
                break
            del self._lines[key]
            if line.count:
                ready.append(line)
            if line.count > 1:  # it goes on, so a new window begins
                self._lines[key] = Repeated(line.text, now, set(line.sources), line.last)
        return ready

    def next_due(self) -> float | None:
        """Return when ``due`` may have something next; None if no line is held back."""
        held = (line.since for line in self._lines.values() if line.count)
        first = next(held, None)  # lines are in the order of their times
        return None if first is None else first + self.window

    def drain(self) -> list[Repeated]:
        """Return all held-back lines, and forget everything."""
        held = [line for line in self._lines.values() if line.count]
        self._lines.clear()
        return held


class LogBatch(NamedTuple):
    """Lines that one worker wrote to one of its streams, as ``LineSplitter`` gives them."""

    name: str  # of the task or actor; "" if unknown
    pid: int
    node: str  # short hex id; "" on the driver's own node, which is not named
    is_stderr: bool
    lines: Sequence[str]


class _Stream(NamedTuple):
    """One stream of a worker."""

    node: str
    pid: int
    is_stderr: bool


class LogPrinter:
    """Prints batches of lines, in one thread; no method raises for a stream that fails.

    Args:
        call_later: Calls a function once, after a number of seconds, in that thread. It
            prints counts of folded lines whose window has passed.
        dedup: Fold lines that several workers write; None takes it from the config.
        window: Seconds over which lines are folded; None takes it from the config.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], object],
        *,
        dedup: bool | None = None,
        window: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        window = config().dedup_window if window is None else window
        self._call_later = call_later
        self._dedup = config().dedup_logs if dedup is None else dedup
        self._clock = clock
        numbers = config().dedup_numbers
        self._deduplicators = {
            is_stderr: LogDeduplicator(window, numbers=numbers) for is_stderr in (False, True)
        }
        self._traces: dict[_Stream, _BegunTrace] = {}
        self._bars = BarRegion()
        self._timer_at: float | None = None
        self._hint_given = False

    def print_batch(self, batch: LogBatch) -> None:
        """Print the lines of a worker, or count them if others have written the same."""
        now = self._clock()
        printed = self._due(now)
        source = _Source(batch.node, batch.pid, batch.name)
        prefix = _prefix(source, batch.is_stderr)
        bars_changed = False
        for line in batch.lines:
            row = bar_row(line)
            if row is None:
                bars_changed |= self._finish_row(batch)
                printed += self._line(batch, source, prefix, line, now)
            elif is_terminal(stream(batch.is_stderr)):
                self._update_bar(batch, row, line.rstrip("\r"))
                bars_changed = True
        if printed or bars_changed:
            self._show(printed)
        self._set_timer(now)

    def print_note(self, text: str) -> None:
        """Print a line of miniray itself on stderr, above the progress bars."""
        self._show([(True, text)])

    def close(self) -> None:
        """Print the counts that are still held back, and forget the progress bars."""
        self._bars.clear()
        printed = [line for trace in self._traces.values() for line in trace.take()]
        printed += [
            (is_stderr, self._folded_line(folded, is_stderr))
            for is_stderr, deduplicator in self._deduplicators.items()
            for folded in deduplicator.drain()
        ]
        self._show(printed)

    def _on_timer(self) -> None:
        self._timer_at = None
        now = self._clock()
        printed = self._due(now)
        if printed:
            self._show(printed)
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        times = [deduplicator.next_due() for deduplicator in self._deduplicators.values()]
        times += [trace.until for trace in self._traces.values() if trace.lines]
        first = min((at for at in times if at is not None), default=None)
        if first is not None and (self._timer_at is None or first < self._timer_at):
            self._timer_at = first
            self._call_later(max(0.0, first - now), self._on_timer)

    def _line(
        self, batch: LogBatch, source: _Source, prefix: str, line: str, now: float
    ) -> list[tuple[bool, str]]:
        """Return what to print now that a worker has written a line."""
        stream = _Stream(batch.node, batch.pid, batch.is_stderr)
        shown = (batch.is_stderr, prefix + line)
        trace = self._traces.pop(stream, None)
        state = _next_of_trace(None if trace is None else trace.state, line)
        if state is None:
            printed = [] if trace is None else trace.take()
            if not self._dedup or self._deduplicators[batch.is_stderr].admit(source, line, now):
                printed.append(shown)
            return printed
        if trace is None or not trace.lines:
            trace = _BegunTrace(state, now + _TRACE_WAIT)
        trace.state = state
        trace.lines.append(shown)
        self._traces[stream] = trace
        printed = []
        if len(self._traces) > _MOST_TRACES:
            printed = self._traces.pop(next(iter(self._traces))).take()
        if state is _Trace.END or len(trace.lines) >= _TRACE_LINES:
            printed += trace.take()
        return printed

    def _due(self, now: float) -> list[tuple[bool, str]]:
        late = [trace for trace in self._traces.values() if trace.until <= now]
        return [line for trace in late for line in trace.take()] + [
            (is_stderr, self._folded_line(folded, is_stderr))
            for is_stderr, deduplicator in self._deduplicators.items()
            for folded in deduplicator.due(now)
        ]

    def _folded_line(self, folded: Repeated, is_stderr: bool) -> str:
        text = _prefix(folded.last, is_stderr) + folded.text
        if folded.count == 1:
            return text
        across = " across cluster" if len({source.node for source in folded.sources}) > 1 else ""
        note = f"[repeated {folded.count}x{across}]"
        if not self._hint_given:
            self._hint_given = True
            note += _HINT
        return f"{text} {_coloured(note, _COUNT_COLOUR, is_stderr)}"

    def _finish_row(self, batch: LogBatch) -> bool:
        if not self._bars:
            return False
        self._bars.finish_row(batch.node, batch.pid, batch.is_stderr)
        return True

    def _update_bar(self, batch: LogBatch, row: int, text: str) -> None:
        line = ""
        if text.strip():
            # Without colour: a cut line must not lose the end of an escape sequence.
            line = _plain_prefix(_Source(batch.node, batch.pid, batch.name)) + text
        self._bars.update(BarKey(batch.node, batch.pid, batch.is_stderr, row), line)

    def _show(self, printed: Sequence[tuple[bool, str]]) -> None:
        SCREEN.show(printed, self._bars.lines())


class _Trace(enum.Enum):
    """What a stream's last line was."""

    FRAME = enum.auto()  # of a traceback whose exception has not come
    END = enum.auto()  # that exception; another traceback of its chain may follow
    FATAL = enum.auto()  # of a fatal error


@dataclasses.dataclass(eq=False, repr=False)
class _BegunTrace:
    """A trace of a stream, with the lines that wait for its end."""

    state: _Trace
    until: float
    lines: list[tuple[bool, str]] = dataclasses.field(default_factory=list)

    def take(self) -> list[tuple[bool, str]]:
        """Return the lines that wait, to be printed."""
        lines, self.lines = self.lines, []
        return lines


def _next_of_trace(before: _Trace | None, line: str) -> _Trace | None:
    """Return what a line of a stream is, after the one before it; None if it is of no trace."""
    if line.startswith(_FATAL):
        return _Trace.FATAL
    if _TRACEBACK in line:
        return _Trace.FRAME
    blank = not line or line[0].isspace()
    if before is _Trace.FATAL:
        if line.startswith(_OF_FATAL[-1]):
            return _Trace.END
        return _Trace.FATAL if blank or line.startswith(_OF_FATAL) else None
    if before is _Trace.FRAME:
        return _Trace.FRAME if blank else _Trace.END
    if before is _Trace.END and (blank or line.startswith(_CHAINED)):
        return _Trace.END
    return None


def _plain_prefix(source: _Source) -> str:
    name = f"{printable(source.name)} " if source.name else ""
    node = f", node={source.node}" if source.node else ""
    return f"({name}pid={source.pid}{node}) "


def _prefix(source: _Source, is_stderr: bool) -> str:
    plain = _plain_prefix(source)
    return _coloured(plain[:-1], _COLOURS[source.pid % len(_COLOURS)], is_stderr) + " "


def _coloured(text: str, colour: int, is_stderr: bool) -> str:
    if "NO_COLOR" in os.environ or not is_terminal(stream(is_stderr)):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def left_out_note(counts: Sequence[tuple[str, str, int]], own_node: str) -> str:
    """Say where lines of workers are that this driver was not sent."""
    most = sorted(((count, path, node) for node, path, count in counts), reverse=True)
    places = [
        f"{count:,} in {path}{f' on node {node}' if node != own_node else ''}"
        for count, path, node in most[:_NAMED_FILES]
    ]
    if len(most) > _NAMED_FILES:
        rest = sum(count for count, *_ in most[_NAMED_FILES:])
        places.append(f"{rest:,} in {len(most) - _NAMED_FILES} more files there")
    total = sum(count for *_, count in counts)
    return (
        f"miniray: {total:,} lines of workers are left out here, because this program did not "
        f"read them in time: {', '.join(places)}."
    )


def _cost(item: LogBatch | str) -> int:
    lines = [item] if isinstance(item, str) else item.lines
    return sum(map(len, lines)) + _LINE_COST * len(lines)


class LogThread:
    """Prints in a daemon thread of its own. Output is put in by one thread.

    Args:
        logs: Folder of the log files, which a note names if output is left out.
        limit: Characters that may wait; default 64 Mi.
    """

    def __init__(self, logs: str, *, limit: int = _LIMIT) -> None:
        self._logs = logs
        self._limit = limit
        self._queue: queue.SimpleQueue[LogBatch | str | None] = queue.SimpleQueue()
        # Each counter is written by one thread only, so that no lock is needed: a signal
        # handler may call shutdown while its thread is in here.
        self._put = 0
        self._printed = 0
        self._left_out = 0
        self._left_out_noted = 0
        self._timer: tuple[float, Callable[[], None]] | None = None
        self._printer = LogPrinter(self._call_later)
        self._thread = threading.Thread(target=self._run, name="miniray-output", daemon=True)
        self._thread.start()

    def put(self, item: LogBatch | str) -> None:
        """Print lines of a worker, or of miniray itself, soon; never waits."""
        cost = _cost(item)
        if self._put - self._printed + cost > self._limit:
            self._left_out += 1 if isinstance(item, str) else len(item.lines)
            return
        self._put += cost
        self._queue.put(item)

    def close(self) -> None:
        """Print waiting lines, then end; give up when the terminal takes none for a while."""
        self._queue.put(None)
        before = -1
        while self._thread.is_alive() and before != self._printed:
            before = self._printed
            self._thread.join(config().stop_grace)
        if self._thread.is_alive():
            logger.warning("output of workers is left unprinted; all of it is in %s", self._logs)

    # --- the thread ----------------------------------------------------------------
    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._wait())
            except queue.Empty:
                self._run_timer()
                continue
            if item is None:
                break
            self._print(item)
            self._note_left_out()
            self._run_timer()
        self._note_left_out()
        self._printer.close()

    def _print(self, item: LogBatch | str) -> None:
        if isinstance(item, str):
            self._printer.print_note(item)
        else:
            self._printer.print_batch(item)
        self._printed += _cost(item)

    def _note_left_out(self) -> None:
        count = self._left_out - self._left_out_noted
        if count:
            self._left_out_noted += count
            self._printer.print_note(
                f"miniray: {count} lines are left out here, because they came faster than they "
                f"could be printed. What workers have printed is in {self._logs}."
            )

    def _call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Set the printer's timer; it has at most one, and sets it in this thread."""
        self._timer = (time.monotonic() + delay, callback)

    def _wait(self) -> float | None:
        return None if self._timer is None else max(0.0, self._timer[0] - time.monotonic())

    def _run_timer(self) -> None:
        if self._wait() == 0 and self._timer is not None:
            _, callback = self._timer
            self._timer = None
            callback()
