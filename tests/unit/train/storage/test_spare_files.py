"""Files that are deleted after their upload change their place, if that is what a copy would be."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from miniray.train import Checkpoint
from miniray.train.storage.storage import RunStorage


@pytest.fixture
def local(tmp_path):
    """A checkpoint's folder with one file, in a folder of its own."""
    folder = tmp_path / "local"
    (folder / "shards").mkdir(parents=True)
    (folder / "shards" / "model").write_text("weights")
    return folder


@pytest.fixture
def store(tmp_path):
    """Uploads a folder to a run's folder; returns where its file is then."""
    storage = RunStorage(tmp_path / "runs", "run")

    def upload(folder, *, spare=True):
        uploaded = storage.upload(Checkpoint(folder), "checkpoint_000000", spare=spare)
        assert uploaded.files == {"shards/model": 7}
        stored = Path(storage.path, "checkpoint_000000", "shards", "model")
        assert stored.read_text() == "weights"
        return stored

    return upload


def test_a_file_that_is_to_be_deleted_is_not_copied(store, local):
    inode = (local / "shards" / "model").stat().st_ino
    stored = store(local)
    assert stored.stat().st_ino == inode
    # Until the caller deletes it, the folder is as it was.
    assert (local / "shards" / "model").read_text() == "weights"


def test_a_file_that_stays_is_copied(store, local):
    stored = store(local, spare=False)
    (local / "shards" / "model").write_text("changed later")
    assert stored.read_text() == "weights"


def test_what_was_there_under_that_name_is_replaced(store, local):
    store(local, spare=False).write_text("by another rank")
    store(local)


def test_a_symbolic_link_is_stored_as_the_file_that_it_names(store, local, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (local / "shards" / "model").rename(elsewhere)
    (local / "shards" / "model").symlink_to(elsewhere)
    stored = store(local)
    elsewhere.write_text("changed later")
    assert stored.read_text() == "weights"
    assert not stored.is_symlink()


def test_a_file_in_a_folder_that_a_symbolic_link_names_is_copied(store, local, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (local / "shards").rename(elsewhere)
    (local / "shards").symlink_to(elsewhere)
    stored = store(local)
    (elsewhere / "model").write_text("changed later")
    assert stored.read_text() == "weights"


def test_a_folder_that_is_named_by_a_symbolic_link_is_no_reason_to_copy(store, local, tmp_path):
    named = tmp_path / "named"
    named.symlink_to(local)
    assert store(named).stat().st_ino == (local / "shards" / "model").stat().st_ino


def test_a_file_that_has_another_name_is_copied(store, local, tmp_path):
    other = tmp_path / "other"
    other.hardlink_to(local / "shards" / "model")
    stored = store(local)
    other.write_text("changed later")
    assert stored.read_text() == "weights"


def test_what_is_stored_has_the_permissions_of_a_copy(store, local):
    (local / "shards" / "model").chmod(0o600)
    stored = store(local)
    fresh = local / "fresh"
    fresh.touch()
    assert stored.stat().st_mode == fresh.stat().st_mode


def test_a_disk_without_links_gets_a_copy(store, local, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    store(local)


def test_a_file_of_another_disk_is_copied(store, local):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shutil.copytree(local, folder, dirs_exist_ok=True)
        store(Path(folder))
