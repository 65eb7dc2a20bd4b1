"""How full the disk of spilled values is, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.node.store.spill_files import Disk, describe_disk, look_at

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


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
