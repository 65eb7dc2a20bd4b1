"""Log files of limited size: those of workers, and those of daemons and heads.

A worker's is opened for each write, so that many workers need no descriptors.
"""

from __future__ import annotations

import bisect
import glob
import logging
import os
import re
import struct
import time
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

from miniray.common.config import config

if TYPE_CHECKING:
    from io import TextIOWrapper
    from pathlib import Path

#: What may stand in the name of a file on any system, and how much of a name does.
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_NAME = 64
#: One entry of when output came, some seconds apart; beyond the limit, every other one is dropped.
_MARK = struct.Struct("<dq")
_BETWEEN_MARKS, _MOST_MARKS = 1.0, 512


def log_name(work: str, pid: int, worker_id: str, actor_id: str = "") -> str:
    """Return the name of a worker's log files without ``.out`` and ``.err``.

    As ``worker-Counter-4711-20261124-221733-47e735193b1e62b0-ACTOR``.

    Args:
        work: Class of the worker's actor, or the task for which it was started.
        pid: Of the worker.
        worker_id: Hex id of the worker.
        actor_id: Hex id of its actor; empty if it runs tasks.
    """
    began = time.strftime("%Y%m%d-%H%M%S")
    name = f"worker-{work_in_name(work)}-{pid}-{began}-{worker_id}"
    return f"{name}-{actor_id}" if actor_id else name


def work_in_name(work: str) -> str:
    """Return how the name of a class or task is written in names of files."""
    return _UNSAFE.sub("_", work)[:_MAX_NAME]


def stamp(now: float) -> str:
    """Return a time as lines of logs begin with: ``2026-11-24 22:17:33.123``."""
    seconds, milliseconds = divmod(int(now * 1000), 1000)
    local = time.localtime(seconds)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', local)}.{milliseconds:03d}"


def stamped(now: float, name: str, text: str) -> str:
    """Return a line of a worker as its log file has it."""
    return f"{stamp(now)} [{name}] {text}\n"


class LogFile:
    """One file and the older ones that it was rotated to, which end in ``.1``, ``.2`` ...

    Args:
        path: The file; it is made when something is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, lines: str) -> None:
        with self.path.open("a", encoding="utf-8", errors="replace") as file:
            if file.tell() < max(1, config().log_file_bytes):
                file.write(lines)
                return
        self._rotate()
        self.write(lines)

    def _rotate(self) -> None:
        older_ones = (f"{self.path.name}.{number}" for number in range(1, config().log_files))
        names = [self.path, *map(self.path.with_name, older_ones)]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            if newer.exists():
                os.replace(newer, older)
        if self.path.exists():  # no older files are kept
            self.path.unlink()


class StreamLog:
    """What a submitted job has printed, by offset: in files of limited size, numbered in order.

    The first file and the last ones are kept; the middle is left out.

    Args:
        path: The first file, which has the bytes from 0 on; the others end in ``.1``, ``.2`` ...
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._limit = max(1, config().log_file_bytes)
        numbers = [int(file.suffix[1:]) for file in self._files() if file.suffix[1:].isdigit()]
        last = max(numbers, default=0)
        file = self._file(last)
        #: Bytes that were written, those that are left out included.
        self.size = last * self._limit + (file.stat().st_size if file.exists() else 0)
        self._oldest = min(numbers, default=1)
        #: Beside the files: when output came, in seconds since the epoch, and at which offset.
        self._times = path.with_name(f"{path.name}.times")
        kept = self._times.read_bytes() if self._times.exists() else b""
        self._marks: list[tuple[float, int]] = [
            (when, at)
            for when, at in _MARK.iter_unpack(kept[: len(kept) // _MARK.size * _MARK.size])
        ]

    def write(self, offset: int, data: bytes) -> None:
        """Add what begins at an offset; data that are there already are not written again.

        Raises:
            OSError: The file cannot be written.
        """
        rest = memoryview(data)[max(0, self.size - offset) :]
        if rest:
            self._mark()
        while rest:
            number, at = divmod(self.size, self._limit)
            with self._file(number).open("ab") as file:
                written = file.write(rest[: self._limit - at])
            self.size += written
            rest = rest[written:]
            while self._oldest <= number - max(1, config().log_files - 1):
                self._file(self._oldest).unlink(missing_ok=True)
                self._oldest += 1

    def read(self, offset: int, most: int) -> tuple[bytes, int]:
        """Return what is at an offset, and the offset to go on at.

        In place of the left-out part it returns a line that says so.
        """
        number, at = divmod(offset, self._limit)
        if offset >= self.size:
            return b"", offset
        if 0 < number < self._oldest:
            end = self._oldest * self._limit
            return f"\n[{end - offset:,} bytes were left out here]\n".encode(), end
        with self._file(number).open("rb") as file:
            file.seek(at)
            data = file.read(min(most, self._limit - at))
        return data, offset + len(data)

    def _mark(self) -> None:
        """Note when the next byte is written: at most once a second, of a long log less often."""
        now = time.time()
        if self._marks and now < self._marks[-1][0] + _BETWEEN_MARKS:
            return
        marks, first = [*self._marks, (now, self.size)], len(self._marks)
        if len(marks) > _MOST_MARKS:
            del marks[1::2]
            first = 0
        descriptor = os.open(self._times, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            data = b"".join(_MARK.pack(*mark) for mark in marks[first:])
            os.pwrite(descriptor, data, first * _MARK.size)
            os.truncate(descriptor, len(marks) * _MARK.size)
        finally:
            os.close(descriptor)
        self._marks = marks  # only what the file has: the next one is written behind it

    def offset_at(self, moment: float) -> int:
        """Return where output begins that came after a moment, or with the last one before it."""
        if not self.size or not self._marks or moment <= self._marks[0][0]:
            return 0
        last = self._file((self.size - 1) // self._limit)  # it may be full, and no next one begun
        if moment > last.stat().st_mtime:
            return self.size
        _, offset = self._marks[bisect.bisect(self._marks, (moment, self.size)) - 1]
        return offset

    def remove(self) -> None:
        for file in (*self._files(), self._times):
            file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        numbered = self._path.parent.glob(f"{glob.escape(self._path.name)}.*")
        return [self._path, *(file for file in numbered if file.suffix[1:].isdigit())]

    def _file(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path


def log_to(path: Path) -> None:
    """Write what this process logs, and its standard output and error, to a file of limited size.

    One that has become as large as ``log_file_bytes`` becomes an older one, which ends in ``.1``;
    of these ``log_files - 1`` are kept, and at least one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[_LogFile(path)],
        force=True,
    )


class _LogFile(RotatingFileHandler):
    """Has what native code prints follow to the new file, so that it keeps no old one alive."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            path,
            maxBytes=max(1, config().log_file_bytes),
            backupCount=max(1, config().log_files - 1),
            encoding="utf-8",
            errors="replace",
        )

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        for standard in (1, 2):
            os.dup2(stream.fileno(), standard)
        return stream
