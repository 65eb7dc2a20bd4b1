from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import fsspec
import pyarrow.fs
import pytest

from miniray.train import Checkpoint


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "source"
    (path / "inner").mkdir(parents=True)
    (path / "model.pt").write_text("weights")
    (path / "inner" / "deep").write_text("x")
    return path


@pytest.fixture
def remote(folder):
    filesystem = fsspec.filesystem("dir", path=str(folder.parent), target_protocol="file")
    return Checkpoint("source", filesystem)


def test_a_local_checkpoint_is_its_own_directory(folder):
    with Checkpoint.from_directory(folder).as_directory() as path:
        assert path == str(folder)
    assert folder.exists()


def test_a_remote_checkpoint_is_fetched_and_deleted_afterwards(remote):
    with remote.as_directory() as path:
        assert Path(path, "model.pt").read_text() == "weights"
        assert Path(path, "inner", "deep").read_text() == "x"
    assert not Path(path).exists()


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_checkpoint_is_copied_into_a_directory(folder, remote, tmp_path, kind):
    checkpoint = Checkpoint.from_directory(folder) if kind == "local" else remote
    target = tmp_path / "new" / "target"
    assert checkpoint.to_directory(target) == str(target)
    assert (target / "model.pt").read_text() == "weights"
    assert (target / "inner" / "deep").read_text() == "x"


def test_metadata_is_stored_with_the_files(folder):
    checkpoint = Checkpoint.from_directory(folder)
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1, "b": 2})
    checkpoint.update_metadata({"b": 3})
    assert Checkpoint.from_directory(folder).get_metadata() == {"a": 1, "b": 3}


def test_metadata_that_are_no_json_are_refused_and_the_earlier_ones_stay(folder):
    checkpoint = Checkpoint.from_directory(folder)
    checkpoint.set_metadata({"epoch": 3})
    with pytest.raises(TypeError, match=r"JSON values: Object of type object"):
        checkpoint.update_metadata({"model": object()})
    assert checkpoint.get_metadata() == {"epoch": 3}


def test_a_checkpoint_can_be_pickled(remote):
    assert pickle.loads(pickle.dumps(remote)) == remote


def test_a_pyarrow_filesystem_is_accepted(folder):
    checkpoint = Checkpoint(str(folder), pyarrow.fs.LocalFileSystem())
    with checkpoint.as_directory() as path:
        assert Path(path, "model.pt").read_text() == "weights"


def test_the_filesystem_is_the_users_own_else_one_of_pyarrow(folder, remote):
    subtree = pyarrow.fs.SubTreeFileSystem(str(folder.parent), pyarrow.fs.LocalFileSystem())
    assert Checkpoint(folder.name, subtree).filesystem is subtree
    assert Checkpoint("source", remote.filesystem).filesystem is remote.filesystem
    for given in (folder, f"file://{folder}"):
        checkpoint = Checkpoint(given)
        assert checkpoint.filesystem == pyarrow.fs.LocalFileSystem()
        with checkpoint.filesystem.open_input_stream(f"{checkpoint.path}/model.pt") as stream:
            assert stream.read() == b"weights"


def test_the_filesystem_of_a_url_leads_to_the_same_checkpoint(folder):
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"{folder}/model.pt", b"weights")
    try:
        checkpoint = Checkpoint(f"memory://{folder}")
        (found,) = checkpoint.filesystem.get_file_info(pyarrow.fs.FileSelector(checkpoint.path))
        assert (found.base_name, found.size) == ("model.pt", 7)
        again = Checkpoint(checkpoint.path, checkpoint.filesystem)
        assert again == checkpoint
        assert again.fsspec_filesystem is memory
        assert pickle.loads(pickle.dumps(again)) == checkpoint
    finally:
        memory.rm(str(folder), recursive=True)


def test_without_pyarrow_the_filesystem_of_a_path_is_refused_with_the_fix(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    checkpoint = Checkpoint(folder)
    with checkpoint.as_directory() as path:
        assert path == str(folder)
    with pytest.raises(ImportError, match=r"pip install 'miniray\[train\]'"):
        checkpoint.filesystem  # noqa: B018


def test_checkpoints_on_equal_filesystems_of_pyarrow_are_equal(folder):
    def on(root):
        local = pyarrow.fs.LocalFileSystem()
        return Checkpoint(folder.name, pyarrow.fs.SubTreeFileSystem(str(root), local))

    checkpoint = on(folder.parent)
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint == on(folder.parent)
    assert checkpoint != on(folder)
    assert checkpoint != Checkpoint(folder.name, fsspec.filesystem("memory"))


def test_a_relative_path_becomes_absolute(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert Checkpoint.from_directory("source").path == str(folder)


def test_a_checkpoint_shows_where_it_is(folder):
    assert repr(Checkpoint(folder)) == f"Checkpoint(filesystem=local, path={folder})"


def test_a_checkpoint_is_not_taken_for_a_path(folder):
    with pytest.raises(TypeError, match="as_directory"):
        os.fspath(Checkpoint(folder))


def test_a_missing_checkpoint_is_named(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="missing"),
        Checkpoint(tmp_path / "missing").as_directory(),
    ):
        pass


def test_a_filesystem_of_no_known_kind_is_refused(folder):
    with pytest.raises(ValueError, match="fsspec nor a pyarrow"):
        Checkpoint(folder, filesystem=object())


def test_a_url_beside_a_filesystem_is_refused():
    with pytest.raises(ValueError, match="leave out"):
        Checkpoint("s3://bucket/x", filesystem=fsspec.filesystem("file"))
