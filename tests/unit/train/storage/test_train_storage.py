from __future__ import annotations

import json
import pickle
from pathlib import Path

import fsspec
import pytest

from miniray.train import Checkpoint
from miniray.train.storage.filesystem import list_files
from miniray.train.storage.storage import RunStorage, default_checkpoint_name


@pytest.fixture(params=["local", "remote"])
def storage(request, tmp_path):
    """A run's folder, on a filesystem that is the machine's own and on one that is not."""
    if request.param == "local":
        return RunStorage(tmp_path / "runs", "run")
    (tmp_path / "bucket").mkdir()
    bucket = fsspec.filesystem(
        "dir",
        path=str(tmp_path / "bucket"),
        target_protocol="file",
        target_options={"auto_mkdir": True},
    )
    return RunStorage("runs", "run", bucket)


@pytest.fixture
def make_checkpoint(tmp_path):
    def make(**files):
        folder = tmp_path / f"source_{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for name, text in files.items():
            path = folder / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return Checkpoint.from_directory(folder)

    return make


def contents(checkpoint):
    with checkpoint.as_directory() as folder:
        return {name: Path(folder, name).read_text() for name in list_files(folder)}


def test_a_committed_checkpoint_is_listed_with_its_metrics(storage, make_checkpoint):
    upload = storage.upload(make_checkpoint(model="weights"), "checkpoint_000003")
    storage.commit(3, [upload], {"loss": 0.5})
    (record,) = storage.records()
    assert (record.name, record.number, record.metrics) == ("checkpoint_000003", 3, {"loss": 0.5})
    assert contents(storage.checkpoint(record.name)) == {"model": "weights"}


def test_ranks_add_files_to_one_checkpoint(storage, make_checkpoint):
    uploads = [
        storage.upload(make_checkpoint(**{f"shards__rank{rank}": "x" * rank}), "checkpoint_000000")
        for rank in range(3)
    ]
    storage.commit(0, uploads, {})
    assert contents(storage.checkpoint("checkpoint_000000")) == {
        "shards/rank0": "",
        "shards/rank1": "x",
        "shards/rank2": "xx",
    }


def test_of_a_file_that_ranks_write_differently_the_last_one_counts(storage, make_checkpoint):
    uploads = [
        storage.upload(make_checkpoint(model=text), "checkpoint_000000") for text in ("a", "bb")
    ]
    storage.commit(0, uploads, {})
    assert len(storage.records()) == 1
    assert contents(storage.checkpoint("checkpoint_000000")) == {"model": "bb"}


def test_a_checkpoint_without_a_manifest_does_not_exist_and_is_deleted(storage, make_checkpoint):
    storage.commit(0, [storage.upload(make_checkpoint(a="1"), "checkpoint_000000")], {})
    storage.upload(make_checkpoint(a="2"), "checkpoint_000001")
    storage.upload(make_checkpoint(a="3"), "my_epoch")
    assert [record.name for record in storage.records()] == ["checkpoint_000000"]
    assert storage.delete_incomplete() == 2
    names = {path.rsplit("/", 1)[-1] for path in storage.filesystem.ls(storage.path, detail=False)}
    assert names == {"checkpoint_000000", ".manifests"}


def test_folders_that_are_no_checkpoints_are_left_alone(storage, make_checkpoint):
    storage.write_run_facts({"token": "t"})
    storage.filesystem.makedirs(f"{storage.path}/plots")
    storage.filesystem.pipe_file(f"{storage.path}/plots/loss.txt", b"1")
    assert storage.delete_incomplete() == 0
    assert storage.filesystem.exists(f"{storage.path}/plots/loss.txt")


def test_the_newest_checkpoint_with_a_lost_file_is_not_used(storage, make_checkpoint, caplog):
    for number in range(2):
        name = default_checkpoint_name(number)
        storage.commit(number, [storage.upload(make_checkpoint(a="1", b="2"), name)], {})
    storage.filesystem.pipe_file(f"{storage.path}/checkpoint_000001/b", b"cut")
    assert [record.name for record in storage.records()] == ["checkpoint_000000"]
    assert "checkpoint_000001" in caplog.text


def test_a_damaged_manifest_commits_nothing(storage, make_checkpoint):
    storage.commit(0, [storage.upload(make_checkpoint(a="1"), "checkpoint_000000")], {})
    storage.filesystem.pipe_file(f"{storage.path}/.manifests/checkpoint_000000.json", b'{"na')
    assert storage.records() == []


def test_a_checkpoint_of_a_later_version_is_kept(storage, make_checkpoint):
    storage.commit(0, [storage.upload(make_checkpoint(a="1"), "checkpoint_000000")], {})
    path = f"{storage.path}/.manifests/checkpoint_000000.json"
    later = json.loads(storage.filesystem.cat_file(path)) | {"checksums": {"a": "c4ca"}}
    storage.filesystem.pipe_file(path, json.dumps(later).encode())
    assert storage.delete_incomplete() == 1
    assert [record.name for record in storage.records()] == ["checkpoint_000000"]


def test_the_name_of_a_complete_checkpoint_is_not_given_again(storage, make_checkpoint):
    storage.commit(0, [storage.upload(make_checkpoint(a="1"), "epoch")], {})
    with pytest.raises(ValueError, match="already has a complete checkpoint 'epoch'"):
        storage.upload(make_checkpoint(a="2"), "epoch")


def test_a_name_may_be_given_again_when_files_of_its_checkpoint_were_lost(storage, make_checkpoint):
    storage.commit(0, [storage.upload(make_checkpoint(a="1"), "epoch")], {})
    storage.filesystem.rm(f"{storage.path}/epoch", recursive=True)
    storage.commit(1, [storage.upload(make_checkpoint(b="2"), "epoch")], {})
    assert [record.number for record in storage.records()] == [1]
    assert contents(storage.checkpoint("epoch")) == {"b": "2"}


def test_a_revoked_checkpoint_keeps_its_files_until_it_is_complete_again(storage, make_checkpoint):
    storage.commit(0, [storage.upload(make_checkpoint(a="1"), "epoch")], {})
    assert storage.committed() == {"epoch"}
    storage.revoke("epoch")
    assert storage.committed() == set()
    assert contents(storage.checkpoint("epoch")) == {"a": "1"}
    storage.commit(1, [storage.adopt(storage.checkpoint("epoch"))], {})
    assert [record.number for record in storage.records()] == [1]
    storage.revoke("epoch")
    storage.delete_incomplete()
    assert not storage.filesystem.exists(f"{storage.path}/epoch")


def test_a_checkpoint_name_that_leaves_the_folder_is_refused(storage, make_checkpoint):
    with pytest.raises(ValueError, match="name of one folder"):
        storage.upload(make_checkpoint(a="1"), "../escape")


def test_a_deleted_checkpoint_is_gone(storage, make_checkpoint):
    storage.commit(0, [storage.upload(make_checkpoint(a="1"), "epoch")], {})
    storage.delete("epoch")
    assert storage.records() == []
    assert not storage.filesystem.exists(f"{storage.path}/epoch")


def test_reporting_a_folder_that_does_not_exist_is_refused(storage, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        storage.upload(Checkpoint.from_directory(tmp_path / "missing"), "checkpoint_000000")


def test_files_written_where_the_checkpoint_belongs_are_not_copied(tmp_path):
    storage = RunStorage(tmp_path, "run")
    folder = tmp_path / "run" / "checkpoint_000000"
    folder.mkdir(parents=True)
    (folder / "model").write_text("weights")
    upload = storage.upload(Checkpoint.from_directory(folder), "checkpoint_000000")
    assert upload.files == {"model": 7}


def test_facts_of_a_run_are_kept_whole(storage):
    assert storage.run_facts() == {}
    assert not storage.exists()
    storage.write_run_facts({"token": "t"})
    assert storage.run_facts() == {"token": "t"}
    assert storage.exists()


def test_a_storage_can_be_pickled(storage, make_checkpoint):
    storage.commit(0, [storage.upload(make_checkpoint(a="1"), "checkpoint_000000")], {})
    assert pickle.loads(pickle.dumps(storage)).records() == storage.records()


def test_metrics_that_are_not_json_are_kept_as_text(storage, make_checkpoint):
    upload = storage.upload(make_checkpoint(a="1"), "checkpoint_000000")
    storage.commit(0, [upload], {"path": Path("/x")})
    manifest = storage.filesystem.cat_file(f"{storage.path}/.manifests/checkpoint_000000.json")
    assert json.loads(manifest)["metrics"] == {"path": "/x"}


def test_what_keeps_a_process_from_using_the_storage_is_told(storage, monkeypatch):
    storage.write_probe("token")
    assert storage.problem_here("other", writes=True) == "not shared"
    assert storage.problem_here("token", writes=True) == ""
    assert storage.files.names() == {".probe-token"}

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(storage.files, "write", refuse)
    assert storage.problem_here("token", writes=False) == ""
    assert "OSError: [Errno 30] Read-only file system" in storage.problem_here("token", writes=True)
