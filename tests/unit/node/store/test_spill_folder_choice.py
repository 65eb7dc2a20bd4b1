"""Which folder takes the values that do not fit into memory."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from miniray.node.store import spill_files
from miniray.node.store.spill_files import is_in_memory, spill_folder
from miniray.system.boot_options import BootError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Folders that are in memory, with what is in them."""
    folders: set[Path] = set()

    def found(folder: Path) -> bool:
        return bool(folders & {folder, *folder.parents})

    monkeypatch.setattr(spill_files, "is_in_memory", found)
    return folders


def test_values_go_into_the_sessions_folder_if_that_is_on_a_disk(tmp_path: Path) -> None:
    session, large = tmp_path / "session", tmp_path / "large"
    assert spill_folder("", session, large) == (session / "spilled", "")


def test_values_do_not_go_from_memory_to_memory(tmp_path: Path, in_memory: set[Path]) -> None:
    session, large = tmp_path / "session", tmp_path / "large"
    large.mkdir()
    in_memory.add(session)
    assert spill_folder("", session, large) == (large, "")


@pytest.mark.parametrize("which", ["none", "wanted"])
def test_who_has_no_disk_for_values_is_told_what_to_set(
    tmp_path: Path, in_memory: set[Path], which: str, caplog: pytest.LogCaptureFixture
) -> None:
    session, large = tmp_path / "session", tmp_path / "large"
    in_memory |= {session, large}
    wanted = "" if which == "none" else str(session / "mine")
    folder, _warning = spill_folder(wanted, session, large)
    assert folder.parent == session
    assert "MINIRAY_SPILL_FOLDER" in caplog.text


def test_the_folder_that_was_chosen_is_used(tmp_path: Path, in_memory: set[Path]) -> None:
    in_memory.add(tmp_path / "session")
    assert spill_folder(str(tmp_path / "mine"), tmp_path / "session") == (tmp_path / "mine", "")
    assert list((tmp_path / "mine").iterdir()) == []  # what it was tried with is gone


def test_a_folder_that_was_chosen_and_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wanted, why in (("file", "File exists"), ("file/folder", "Not a directory")):
        path = str(tmp_path / wanted)
        with pytest.raises(BootError, match="Set it to a folder") as refused:
            spill_folder(path, tmp_path / "session")
        assert f"MINIRAY_SPILL_FOLDER is '{path}', and" in str(refused.value)
        assert why in str(refused.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_was_chosen_and_is_another_users_is_refused() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own nobody else may enter
        os.chmod(place, 0o755)
        shut = Path(place, "shut")
        shut.mkdir(mode=0o700)
        for wanted in (place, str(shut), str(shut / "new")):
            with another_user(), pytest.raises(BootError, match="Permission denied"):
                spill_folder(wanted, Path(place, "session"))


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """What this process does with files, it does as nobody."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def fails_with(number: int) -> Callable[[Path], int]:
    def open_file(_folder: Path) -> int:
        raise OSError(number, os.strerror(number))

    return open_file


@pytest.mark.parametrize("wanted", ["", "mine"])
def test_that_the_disk_is_full_is_a_warning(
    tmp_path: Path, wanted: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spill_files, "open_file", fails_with(errno.ENOSPC))
    path = str(tmp_path / wanted) if wanted else ""
    folder, warning = spill_folder(path, tmp_path / "session")
    assert f"No file can be made in {folder}, where" in warning
    assert "No space left on device" in warning
    assert warning in caplog.text


def test_that_a_folder_which_nobody_chose_cannot_be_used_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_files, "open_file", fails_with(errno.EROFS))
    _folder, warning = spill_folder("", tmp_path / "session", tmp_path / "large")
    assert "Read-only file system" in warning
    assert "MINIRAY_SPILL_FOLDER sets another folder" in warning


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
