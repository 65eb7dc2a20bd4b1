"""Log files of workers: their names and their limit."""

from __future__ import annotations

import errno
import os
import re
import time
from typing import TYPE_CHECKING

import pytest

from miniray.common.config import config
from miniray.system.log_file import LogFile, StreamLog, log_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(name="limit")
def _limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    def limit(size: int, files: int) -> None:
        monkeypatch.setenv("MINIRAY_LOG_FILE_BYTES", str(size))
        monkeypatch.setenv("MINIRAY_LOG_FILES", str(files))
        config.cache_clear()

    yield limit
    config.cache_clear()


@pytest.mark.parametrize("files", [1, 2, 4])
def test_the_latest_lines_are_kept_whole_in_so_many_files(
    tmp_path: Path, limit: Callable[[int, int], None], files: int
) -> None:
    limit(100, files)
    log = LogFile(tmp_path / "w.out")
    lines = [f"line {number:03}\n" for number in range(200)]
    for line in lines:
        log.write(line)
    found = sorted(tmp_path.iterdir(), reverse=True)  # the oldest first
    assert len(found) == files
    kept = "".join(path.read_text() for path in found)
    assert "".join(lines).endswith(kept)
    assert 100 * (files - 1) < len(kept) < 100 * files + 10 * files


def test_a_write_that_is_larger_than_the_limit_is_not_cut(
    tmp_path: Path, limit: Callable[[int, int], None]
) -> None:
    limit(100, 2)
    log = LogFile(tmp_path / "w.out")
    log.write("a" * 500 + "\n")
    log.write("b\n")
    assert (tmp_path / "w.out.1").read_text() == "a" * 500 + "\n"
    assert (tmp_path / "w.out").read_text() == "b\n"


def test_a_class_of_any_name_gives_a_file_name() -> None:
    name = log_name("Outer.Inner", 7, "ab", "cd")
    assert re.fullmatch(r"worker-Outer\.Inner-7-\d{8}-\d{6}-ab-cd", name)
    name = log_name("../\x1b[2J\0é" + "x" * 500, 7, "ab")
    assert name.startswith("worker-.._")
    assert name.isascii()
    assert name.isprintable()
    assert "/" not in name
    assert len(name) < 100


def test_of_a_log_whose_last_file_is_just_full_the_times_are_known(
    tmp_path: Path, limit: Callable[[int, int], None]
) -> None:
    limit(100, 2)
    log = StreamLog(tmp_path / "job.log")
    log.write(0, b"x" * 300)
    assert log.offset_at(time.time() + 60) == 300
    assert log.offset_at(time.time() - 60) == 0


def test_a_time_that_a_full_disk_did_not_take_leaves_no_gap_in_the_file_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    log = StreamLog(tmp_path / "job.log")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write_later(text: bytes) -> None:
        log.write(log.size, text)
        now[0] += 10

    write_later(b"one ")
    write_later(b"two ")
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            write_later(b"lost")
    now[0] += 10
    write_later(b"new ")
    assert StreamLog(tmp_path / "job.log").offset_at(1015.0) == 4
