from __future__ import annotations

import errno
import os
import pickle
import sys
from pathlib import Path

import fsspec
import pytest

from miniray.train import Checkpoint, DataParallelTrainer, Result, RunConfig
from miniray.train.storage.filesystem import Store, refuse_memory, resolve
from miniray.train.storage.storage import RunStorage

pyarrow_fs = pytest.importorskip("pyarrow.fs")


@pytest.fixture(params=["local", "no parents", "parents", "pyarrow", "pyarrow local", "url"])
def store_of_kind(request, tmp_path):
    """The arguments of a storage, for each kind of filesystem that a user may give."""
    folder = tmp_path / "store"
    folder.mkdir()
    options = {"auto_mkdir": request.param == "parents"}
    return {
        "local": (str(folder), None),
        "url": (f"file://{folder}", None),
        "pyarrow local": (str(folder), pyarrow_fs.LocalFileSystem()),
        "pyarrow": ("a/b", pyarrow_fs.SubTreeFileSystem(str(folder), pyarrow_fs.LocalFileSystem())),
    }.get(
        request.param,
        (
            "a/b",
            fsspec.filesystem(
                "dir", path=str(folder), target_protocol="file", target_options=options
            ),
        ),
    )


@pytest.mark.parametrize(
    ("url", "message"), [("abc://x", "Protocol not known"), ("gs://x", "gcsfs")]
)
def test_a_url_that_can_not_be_reached_is_named(url, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises((ValueError, ImportError), match=f"'{url}' can't be reached: .*{message}"):
        resolve(url)


def test_options_of_a_url_are_those_of_pyarrow_and_no_part_of_the_path():
    url = "s3://bucket/runs?endpoint_override=localhost:9000&scheme=http&region=here"
    filesystem, path = resolve(url)
    assert path == "bucket/runs"
    assert filesystem.fs.region == "here"
    assert pickle.loads(pickle.dumps(filesystem)).fs == filesystem.fs
    with pytest.raises(ValueError, match=r"endpoint_overide.* behind the question mark"):
        resolve("s3://bucket/runs?endpoint_overide=localhost:9000&region=here")


def test_a_checkpoint_goes_through_any_filesystem(store_of_kind, tmp_path):
    path, filesystem = store_of_kind
    storage = pickle.loads(pickle.dumps(RunStorage(path, "run", filesystem)))
    storage.write_run_facts({"token": "t", "state": "FINISHED"})
    for rank in range(2):
        folder = tmp_path / str(rank) / "deep" / "er"
        folder.mkdir(parents=True)
        (folder / f"shard{rank}").write_text(str(rank))
        (folder.parent.parent / "same").write_text(f"from {rank}")
    for number, name in enumerate(["checkpoint_000000", "epoch=[1]*"]):
        uploads = [
            storage.upload(Checkpoint.from_directory(tmp_path / str(rank)), name)
            for rank in range(2)
        ]
        storage.commit(number, uploads, {"loss": 1})
    storage.upload(Checkpoint.from_directory(tmp_path / "0"), "incomplete")
    storage.upload(Checkpoint.from_directory(tmp_path / "0"), "checkpoint_000007")

    assert storage.delete_incomplete() == 8
    assert storage.files.names() == {"run.json", ".manifests", "checkpoint_000000", "epoch=[1]*"}
    joined = f"{path}/run" if filesystem is not None else f"{path}/run/"
    checkpoint = Result.from_path(joined, filesystem).checkpoint
    checkpoint.update_metadata({"epoch": 1})
    with checkpoint.as_directory() as local:
        assert Path(local, "deep", "er", "shard1").read_text() == "1"
        assert Path(local, "same").read_text() == "from 1"  # of the rank that was last
    assert checkpoint.get_metadata() == {"epoch": 1}
    result = Result.from_path(joined, filesystem)
    for shown in (result.filesystem, checkpoint.filesystem, storage.storage_filesystem):
        assert shown == filesystem if filesystem else isinstance(shown, pyarrow_fs.LocalFileSystem)
    assert len(storage.records()) == 2  # metadata that was added later do not spoil it
    storage.delete("epoch=[1]*")
    storage.delete("epoch=[1]*")
    assert [record.name for record in storage.records()] == ["checkpoint_000000"]


def test_a_name_with_a_pattern_deletes_nothing_else(tmp_path):
    remote = fsspec.filesystem("dir", path=str(tmp_path), target_protocol="file")
    store = Store(remote, "run")
    store.write("a/x", "1")
    store.write("*/x", "2")
    store.delete_folder("*")
    assert store.read("a/x") == "1"
    assert store.read("*/x") is None


def test_the_memory_of_one_process_is_refused_as_storage(tmp_path):
    for path, filesystem in [
        ("memory://runs", None),
        ("runs", fsspec.filesystem("memory")),
        ("runs", fsspec.filesystem("dir", path="/x", target_protocol="memory")),
        ("runs", pyarrow_fs._MockFileSystem()),
        ("runs", pyarrow_fs.SubTreeFileSystem("x", pyarrow_fs._MockFileSystem())),
    ]:
        config = RunConfig(storage_path=path, storage_filesystem=filesystem)
        with pytest.raises(ValueError, match=r"in the memory of one process.*s3://bucket"):
            DataParallelTrainer(lambda: None, run_config=config).fit()
    for filesystem in (
        fsspec.filesystem("file"),
        fsspec.filesystem("dir", path="/x", target_protocol="file"),
        resolve("x", pyarrow_fs.SubTreeFileSystem("/x", pyarrow_fs.LocalFileSystem()))[0],
    ):
        refuse_memory(filesystem, str(tmp_path))


def test_the_parts_of_files_have_names_of_their_own(tmp_path, monkeypatch):
    seen = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda s, to: (seen.append(s.name), replace(s, to))[1])
    store = Store(fsspec.filesystem("file"), str(tmp_path))
    for _ in range(3):
        store.write("a", "1")
    assert len(set(seen)) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_a_copy_that_fails_leaves_no_part(tmp_path):
    store = Store(fsspec.filesystem("file"), str(tmp_path / "store"))
    (tmp_path / "source").mkdir()
    with pytest.raises(FileNotFoundError):
        store.put(tmp_path / "source", ["missing"], "target")
    assert list((tmp_path / "store").rglob("*")) == [tmp_path / "store" / "target"]


def test_the_error_of_a_full_disk_names_the_file(tmp_path, monkeypatch):
    store = Store(fsspec.filesystem("file"), str(tmp_path))
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/metrics\.jsonl'"):
        store.append("metrics.jsonl", "{}\n")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/\.run\.json\.part-\w+'"):
        store.write("run.json", "{}")


def test_text_that_is_no_unicode_is_written_escaped(store_of_kind):
    path, filesystem = store_of_kind
    store = RunStorage(path, "run", filesystem).files
    store.write("metrics.csv", "name\nm\udcff.txt\n")  # as os.listdir gives the name b"m\xff.txt"
    assert store.read("metrics.csv") == "name\nm\\udcff.txt\n"


def test_an_error_of_writing_is_told_also_if_nothing_can_be_deleted(tmp_path, monkeypatch):
    store = Store(fsspec.filesystem("file"), str(tmp_path))

    def read_only(path, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for method in ("write_bytes", "unlink"):
        monkeypatch.setattr(Path, method, read_only)
    with pytest.raises(OSError, match="Read-only file system") as raised:
        store.write("run.json", "{}")
    assert raised.value.__context__ is None


def test_a_download_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "store" / "x").mkdir(parents=True)
    (tmp_path / "store" / "x" / "model").write_text("weights")
    remote = fsspec.filesystem("dir", path=str(tmp_path / "store"), target_protocol="file")

    def broken(*args, **kwargs):
        raise OSError("connection lost")

    monkeypatch.setattr(remote, "get", broken)
    checkpoint = Checkpoint("x", remote)
    with pytest.raises(OSError, match="connection lost"), checkpoint.as_directory():
        pass
    assert list((tmp_path / "temporary").iterdir()) == []
