"""Log files of limited size: those of workers, and those of daemons and heads.

A worker's is opened for each write, so that many workers need no descriptors.
"""

from __future__ import annotations

import logging
import os
import re
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

from miniray.common.config import config

if TYPE_CHECKING:
    from io import TextIOWrapper
    from pathlib import Path

#: What may stand in the name of a file on any system, and how much of a name does.
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_NAME = 64


def log_name(work: str, pid: int, worker_id: str, stream: str) -> str:
    """Return the name of a log file: ``worker-Counter-4711-47e735193b1e62b0.err``.

    Args:
        work: Class of the worker's actor, or ``task``.
        pid: Of the worker.
        worker_id: Hex id of the worker.
        stream: ``out`` or ``err``.
    """
    return f"worker-{_UNSAFE.sub('_', work)[:_MAX_NAME]}-{pid}-{worker_id}.{stream}"


class LogFile:
    """One file and the older ones that it was rotated to, which end in ``.1``, ``.2`` ...

    Args:
        path: The file; it is made when something is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, lines: str) -> None:
        """Add whole lines."""
        with self.path.open("a", encoding="utf-8", errors="replace") as file:
            if file.tell() < max(1, config().log_file_bytes):
                file.write(lines)
                return
        self._rotate()
        self.write(lines)

    def _rotate(self) -> None:
        names = [self.path, *(self._older(number) for number in range(1, config().log_files))]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            if newer.exists():
                os.replace(newer, older)
        if self.path.exists():  # no older files are kept
            self.path.unlink()

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def has_lines(self) -> bool:
        """Return whether anything was written."""
        return self.path.exists()


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
