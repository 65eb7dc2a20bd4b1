"""The log file of a daemon or a head: limited as those of workers are."""

from __future__ import annotations

import logging
import os
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

from miniray.common.config import config

if TYPE_CHECKING:
    from io import TextIOWrapper
    from pathlib import Path


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
