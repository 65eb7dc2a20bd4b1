"""Output of workers: from their pipes into log files, and as lines to their driver."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from miniray.common.log_lines import LineSplitter, LogLine, bar_row
from miniray.system.log_file import LogFile
from miniray.worker.worker_file import has_unread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_READ_SIZE = 64 * 1024
#: Seconds of silence after which an unfinished line is shown.
_SETTLE_AFTER = 0.2


class OutputPipe:
    """One stream of one worker.

    ``running`` returns the number and the name under which the worker writes now; ``on_lines`` gets
    the lines that a read completed.
    """

    def __init__(
        self,
        running: Callable[[], tuple[int, str]],
        on_lines: Callable[[list[LogLine]], None],
    ) -> None:
        #: The file of its lines, from ``begin`` on.
        self.log: LogFile | None = None
        self._running = running
        self._on_lines = on_lines
        self._splitter = LineSplitter()
        self._loop = asyncio.get_running_loop()
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self._closed = False
        self._settling: asyncio.TimerHandle | None = None

    def named(self) -> tuple[int, str]:
        """The number and the name under which the worker writes; ``(0, "")`` before the first."""
        return max(self._running(), self._splitter.named)

    def begin(self, path: Path) -> None:
        self.log = LogFile(path)
        self._loop.add_reader(self._read, self._on_readable)

    def _on_readable(self) -> None:
        """Read what is there; the pipe itself says where the name changes within it."""
        running = self._running()
        try:
            data = os.read(self._read, _READ_SIZE)
        except BlockingIOError:
            return
        if data:
            self._take(data, running)
        else:
            self.close()

    def _take(self, data: bytes, running: tuple[int, str]) -> None:
        self._pass_on(self._splitter.feed(data, *running))
        if self._splitter.unsettled and self._settling is None:
            self._settling = self._loop.call_later(_SETTLE_AFTER, self._settle)

    def _settle(self) -> None:
        """Show the last state of a progress bar although no output follows it."""
        self._settling = None
        if not self._closed:
            self._pass_on(self._splitter.settle())

    def _pass_on(self, lines: list[LogLine]) -> None:
        if not lines or self.log is None:
            return
        finished = "".join(f"{line.text}\n" for line in lines if bar_row(line.text) is None)
        if finished:
            self.log.write(finished)
        self._on_lines(lines)

    def flush(self) -> None:
        """Pass on what was written up to now, with an unfinished line as if it were finished."""
        if self._closed:
            return
        if has_unread(self._read):
            self._on_readable()  # one read takes all that a pipe holds
        if not self._closed:
            self._pass_on(self._splitter.close())

    def drain(self) -> None:
        """Read the rest of the pipe of a worker that has ended."""
        while not self._closed:
            try:
                data = os.read(self._read, _READ_SIZE)
            except BlockingIOError:
                break
            if not data:
                break
            self._take(data, self._running())
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._read)
        os.close(self._read)
        self._pass_on(self._splitter.close())
