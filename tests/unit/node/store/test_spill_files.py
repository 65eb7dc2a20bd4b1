"""Files for values that do not fit into memory: shared by small ones, and nameless."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING

import pytest
from open_files import open_files

from miniray.node.store import spill_files
from miniray.node.store.spill_files import (
    Disk,
    SpillFiles,
    describe_disk,
    look_at,
    read,
    read_piece,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.node.store.spill_files import DiskPlace

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SpillFiles]:
    files = SpillFiles(tmp_path / "spilled")
    yield files
    files.close()


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("spill-test", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def never() -> bool:
    return False


def stored(files: SpillFiles, memory: int, value: bytes) -> DiskPlace:
    os.ftruncate(memory, len(value))
    os.pwrite(memory, value, 0)
    place = files.reserve(len(value))
    write(place, memory, never)
    return place


def open_in(folder: Path) -> int:
    """How many files of a folder are open; of other tests, threads may still close some."""
    return sum(n for name, n in open_files().items() if name.startswith(f"{folder}/"))


def close(files: SpillFiles, place: DiskPlace) -> None:
    """Release a value, and wait until its file is closed if it was the last one."""
    files.release(place)
    asyncio.run(files.describe_disk())


def test_values_come_back_as_they_were(files: SpillFiles, memory: int) -> None:
    values = [os.urandom(size) for size in (1, 4095, 4096, 4097, 3 * MIB + 5)]
    places = [stored(files, memory, value) for value in values]
    for value, place in zip(values, places, strict=True):
        os.ftruncate(memory, 0)
        os.ftruncate(memory, len(value))
        read(place, memory, never)
        assert os.pread(memory, len(value), 0) == value
        assert read_piece(place, 0, len(value)) == value
        assert read_piece(place, len(value) - 1, 100) == value[-1:]


def test_values_of_more_than_a_step_are_moved_whole(
    files: SpillFiles, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_files, "_STEP", 1000)
    value = os.urandom(12_345)
    place = stored(files, memory, value)
    os.pwrite(memory, bytes(len(value)), 0)
    read(place, memory, never)
    assert os.pread(memory, len(value), 0) == value


def test_many_values_share_a_descriptor(files: SpillFiles, memory: int, tmp_path: Path) -> None:
    first = stored(files, memory, b"x" * 100_000)
    before = open_in(tmp_path)
    places = [stored(files, memory, b"x" * 100_000) for _ in range(100)]
    assert open_in(tmp_path) == before
    assert {place.fd for place in places} == {first.fd}


def test_a_large_value_has_a_file_to_itself(files: SpillFiles, memory: int, tmp_path: Path) -> None:
    small = stored(files, memory, b"x")
    large = stored(files, memory, b"y" * 5 * MIB)
    assert large.fd != small.fd
    assert stored(files, memory, b"z").fd == small.fd
    before = open_in(tmp_path)
    close(files, large)
    assert open_in(tmp_path) == before - 1


def test_a_file_that_is_full_takes_no_more_values(files: SpillFiles, memory: int) -> None:
    places = [stored(files, memory, b"x" * 3 * MIB) for _ in range(6)]
    assert [place.fd == places[0].fd for place in places] == [True] * 5 + [False]


def test_the_files_have_no_name(files: SpillFiles, memory: int) -> None:
    stored(files, memory, b"x" * MIB)
    assert list(files.folder.iterdir()) == []


def test_a_file_is_closed_with_its_last_value(
    files: SpillFiles, memory: int, tmp_path: Path
) -> None:
    before = open_in(tmp_path)
    places = [stored(files, memory, b"x" * MIB) for _ in range(3)]
    for left, place in zip((2, 1, 0), places, strict=True):
        close(files, place)
        assert files.used == left * MIB
        assert open_in(tmp_path) == before + (left > 0)
    assert read_piece(stored(files, memory, b"next"), 0, 4) == b"next"


def test_a_file_system_without_nameless_files_serves_as_well(
    files: SpillFiles, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    assert read_piece(stored(files, memory, b"value"), 0, 5) == b"value"
    assert list(files.folder.iterdir()) == []


def test_a_cut_off_file_is_an_error_and_not_zeros(files: SpillFiles, memory: int) -> None:
    place = stored(files, memory, b"x" * MIB)
    os.ftruncate(place.fd, MIB // 2)
    with pytest.raises(OSError, match=f"only {MIB // 2} of {MIB} bytes"):
        read(place, memory, never)


def test_moving_ends_early_when_the_node_stops(files: SpillFiles, memory: int) -> None:
    os.ftruncate(memory, MIB)
    place = files.reserve(MIB)
    write(place, memory, lambda: True)
    assert read_piece(place, 0, 10) == b""


def test_a_value_with_a_file_to_itself_leaves_descriptors_for_others(
    files: SpillFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = files.reserve_file(MIB)
    monkeypatch.setattr(spill_files, "limit", lambda: place.fd + spill_files.RESERVE)
    before = open_in(tmp_path)
    with pytest.raises(OSError, match="Too many open files"):
        files.reserve_file(MIB)
    assert open_in(tmp_path) == before
    files.reserve(MIB)  # one for many values


# --- the disk ----------------------------------------------------------------------------
def test_a_full_disk_is_told_with_what_values_and_other_files_take_of_it() -> None:
    assert describe_disk(Disk(100 * MIB, 4 * MIB), 60 * MIB) == (
        "Of the 100 MiB of that disk, values of this node take 60 MiB, other files take 36 MiB, "
        "and 4 MiB are free."
    )


def test_values_that_are_still_being_written_take_no_more_than_is_taken() -> None:
    told = describe_disk(Disk(10 * MIB, 8 * MIB), 3 * MIB)
    assert "values of this node take 2 MiB, other files take 0 B" in told


def test_the_disk_of_a_folder_has_a_size_and_one_that_is_not_there_has_none(
    tmp_path: Path,
) -> None:
    disk = look_at(tmp_path)
    assert disk is not None
    assert 0 <= disk.free <= disk.size
    assert look_at(tmp_path / "nothing") is None
