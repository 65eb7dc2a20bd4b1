"""A search of log files does not keep the daemon from its work, whatever is searched for."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING

import pytest

from miniray.logs.log_files import LogQuery, read, search
from miniray.system.log_file import log_name, stamped
from miniray.util import logs

if TYPE_CHECKING:
    from pathlib import Path


def written(folder: Path, *lines: str) -> Path:
    path = folder / f"{log_name('f', 1, 'ab' * 8)}.out"
    path.write_text("".join(stamped(time.time(), "f", line) for line in lines))
    return folder


def test_a_search_finds_what_a_reading_finds(tmp_path: Path) -> None:
    query = LogQuery(grep="needle|\u00e9", tail=5)
    folder = written(tmp_path, "hay", "a needle", "caf\u00e9")
    found = asyncio.run(search(folder, query, 60.0))
    assert [tuple(line) for line in found["lines"]] == read(folder, query)["lines"]
    assert len(found["lines"]) == 2
    assert found["ends"] == read(folder, query)["ends"]


def test_a_search_without_an_end_is_given_up_and_lets_the_daemon_run(tmp_path: Path) -> None:
    folder = written(tmp_path, 40 * "a" + "!")
    query = LogQuery(grep="(a+)+$")

    async def run() -> int:
        searching = asyncio.create_task(search(folder, query, 1.0))
        turns = 0
        while not searching.done():
            await asyncio.sleep(0.05)
            turns += 1
        with pytest.raises(TimeoutError, match="to search takes more than 1 s"):
            await searching
        return turns

    assert asyncio.run(run()) > 5


def test_a_search_of_a_folder_that_is_given_up_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, 40 * "a" + "!")
    monkeypatch.setattr(logs, "_PATIENCE", 1.0)
    with pytest.raises(TimeoutError, match=f"The logs in {folder}: to search takes more than 1 s"):
        logs.of_folders((folder,), LogQuery(grep="(a+)+$"))
    gc.collect()  # warns of what is still open
