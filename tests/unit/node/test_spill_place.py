"""Which folder takes the values that do not fit into memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from miniray.node import spill_place
from miniray.node.spill_place import is_in_memory, spill_folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Folders that are in memory, with what is in them."""
    folders: set[Path] = set()

    def found(folder: Path) -> bool:
        return bool(folders & {folder, *folder.parents})

    monkeypatch.setattr(spill_place, "is_in_memory", found)
    return folders


def test_values_go_into_the_sessions_folder_if_that_is_on_a_disk(tmp_path: Path) -> None:
    session, large = tmp_path / "session", tmp_path / "large"
    assert spill_folder("", session, large) == session / "spilled"


def test_values_do_not_go_from_memory_to_memory(tmp_path: Path, in_memory: set[Path]) -> None:
    session, large = tmp_path / "session", tmp_path / "large"
    large.mkdir()
    in_memory.add(session)
    assert spill_folder("", session, large) == large


@pytest.mark.parametrize("which", ["none", "wanted"])
def test_who_has_no_disk_for_values_is_told_what_to_set(
    tmp_path: Path, in_memory: set[Path], which: str, caplog: pytest.LogCaptureFixture
) -> None:
    session, large = tmp_path / "session", tmp_path / "large"
    in_memory |= {session, large}
    wanted = "" if which == "none" else str(session / "mine")
    assert spill_folder(wanted, session, large).parent == session
    assert "MINIRAY_SPILL_FOLDER" in caplog.text


def test_the_folder_that_was_chosen_is_used(tmp_path: Path, in_memory: set[Path]) -> None:
    in_memory.add(tmp_path / "session")
    assert spill_folder(str(tmp_path / "mine"), tmp_path / "session") == tmp_path / "mine"


def test_a_file_system_is_found_by_its_device(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    for system, expected in (("tmpfs", True), ("ext4", False)):
        mounts.write_text(
            f"21 1 0:1 / /elsewhere rw - tmpfs none rw\n"
            f"22 1 {number} /a\\040b /c rw shared:1 master:2 - {system} /dev/x rw\n"
        )
        assert is_in_memory(tmp_path / "not" / "there", mounts) is expected
    mounts.write_text("")
    assert not is_in_memory(tmp_path, mounts)
