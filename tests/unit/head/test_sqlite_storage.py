"""What the head keeps when writing fails: nothing is lost but what is too large for the file."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.head import storage as storage_module
from miniray.head.storage import SqliteStorage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest


@contextlib.asynccontextmanager
async def storage_at(path: Path, told: list[str]) -> AsyncIterator[SqliteStorage]:
    storage = SqliteStorage(path, told.append)
    storage.start("cluster")
    try:
        yield storage
    finally:
        await storage.close()


_RECORDS = "SELECT record FROM things WHERE kind = 'value'"


def kept(path: Path) -> dict[Any, bytes]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        records = [marshal.loads(record) for (record,) in database.execute(_RECORDS)]
        return {key: value for _namespace, key, value in records}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20) if hasattr(asyncio, "timeout") else contextlib.nullcontext():
        while not condition():
            await asyncio.sleep(0.01)


def test_every_text_may_be_a_key(tmp_path: Path) -> None:
    path = tmp_path / "head.db"

    async def run() -> None:
        async with storage_at(path, []) as storage:
            storage.key_value("space", "half of a pair: \ud800", b"1")
            storage.key_value("space", b"bytes", b"2")

    asyncio.run(run())
    assert kept(path) == {"half of a pair: \ud800": b"1", b"bytes": b"2"}


def test_a_value_that_is_too_large_for_the_file_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert storage_module._LONGEST < 10**9  # SQLite's limit, of which a test takes too long
    monkeypatch.setattr(storage_module, "_LONGEST", 10_000)
    path = tmp_path / "head.db"

    async def run() -> None:
        async with storage_at(path, []) as storage:
            storage.key_value("space", b"large", b"small at first")
            storage.key_value("space", b"large", bytes(10_001))
            storage.key_value("space", b"other", b"1")

    asyncio.run(run())
    assert kept(path) == {b"other": b"1"}
    assert "large" in caplog.text


def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "head.db"
    told: list[str] = []

    async def run() -> None:
        async with storage_at(path, told) as storage:
            (pages,) = storage._database.execute("PRAGMA page_count").fetchone()
            storage._database.execute(f"PRAGMA max_page_count = {pages}")
            for n in range(100):
                storage.key_value("space", b"%d" % n, bytes(10_000))
            await until(lambda: told)
            storage.key_value("space", b"0", b"newer")
            storage.key_value("space", b"1", None)
            assert kept(path) == {}
            storage._database.execute("PRAGMA max_page_count = 100000")
            await until(lambda: len(kept(path)) == 99)

    asyncio.run(run())
    assert len(told) == 1
    assert "full" in told[0]
    assert "written to" in caplog.text
    values = kept(path)
    assert values[b"0"] == b"newer"
    assert b"1" not in values


def test_nobody_waits_for_a_disk_that_stays_full(tmp_path: Path) -> None:
    told: list[str] = []
    done: list[int] = []

    async def run() -> None:
        async with storage_at(tmp_path / "head.db", told) as storage:
            (pages,) = storage._database.execute("PRAGMA page_count").fetchone()
            storage._database.execute(f"PRAGMA max_page_count = {pages}")
            storage.key_value("space", b"key", bytes(1 << 20))
            storage.when_written(lambda: done.append(1))
            assert done == []
            await until(lambda: told)
            storage.when_written(lambda: done.append(2))
            assert done == [1, 2]

    asyncio.run(run())


def test_closing_does_not_wait_for_a_disk_that_stays_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "head.db"

    async def run() -> None:
        async with storage_at(path, []) as storage:
            (pages,) = storage._database.execute("PRAGMA page_count").fetchone()
            storage._database.execute(f"PRAGMA max_page_count = {pages}")
            storage.key_value("space", b"key", bytes(1 << 20))

    asyncio.run(run())
    assert "never written" in caplog.text


def test_what_is_deleted_is_not_written_once_more(tmp_path: Path) -> None:
    path = tmp_path / "head.db"
    size = 16 << 20

    async def run() -> int:
        async with storage_at(path, []) as storage:
            for key in range(4):
                storage.key_value("space", bytes([key]), bytes(size // 4))
            await until(lambda: path.stat().st_size > size)
            before = written()
            for key in range(4):
                storage.key_value("space", bytes([key]), None)
            await until(lambda: path.stat().st_size < size // 4)
            return written() - before

    assert asyncio.run(run()) < size // 4


def written() -> int:
    """Bytes that this process has written."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])
