"""The thread in which a driver prints what workers wrote and what the head warns of.

Responsible for order, for a bound on what waits, and for printing the rest at the end;
what is printed is ``log_printer``'s business. A paused terminal holds up this thread only.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.logs.log_printer import LogBatch, LogPrinter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

#: Characters that may wait to be printed; what comes beyond that is left out.
_LIMIT = 64 * 1024 * 1024
#: So many log files are named in which lines are that were left out.
_NAMED_FILES = 4
#: What a line takes beside its characters.
_LINE_COST = 64


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
        self._left_out_told = 0
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
        """Print what waits, then end; gives up when the terminal takes nothing for a while."""
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
            self._tell_left_out()
            self._run_timer()
        self._tell_left_out()
        self._printer.close()

    def _print(self, item: LogBatch | str) -> None:
        if isinstance(item, str):
            self._printer.print_note(item)
        else:
            self._printer.print_batch(item)
        self._printed += _cost(item)

    def _tell_left_out(self) -> None:
        count = self._left_out - self._left_out_told
        if count:
            self._left_out_told += count
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
