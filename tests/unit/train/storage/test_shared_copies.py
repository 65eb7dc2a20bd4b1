"""Remote checkpoints are fetched once for all processes of a machine that read them at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import fsspec
import pytest
from checkpoint_store import store_of_two

from miniray.train import Checkpoint
from miniray.train.storage import checkpoint as checkpoint_module
from miniray.train.storage.filesystem import download


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where temporary files of this test are."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture
def store(tmp_path):
    return store_of_two(tmp_path / "store")


class Fetches:
    """Stands in for the download, which goes on when a test says so."""

    def __init__(self, monkeypatch):
        self.count = 0
        self.begun = threading.Event()
        self.go = threading.Event()
        self.error = None
        monkeypatch.setattr(checkpoint_module, "download", self)

    def __call__(self, filesystem, path, target):
        self.count += 1
        self.begun.set()
        assert self.go.wait(20)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        download(filesystem, path, target)


def read(folder):
    return Path(folder, "inner", "weights").read_text()


def test_who_reads_at_the_same_time_shares_a_copy_and_the_last_one_deletes_it(
    store, place, monkeypatch
):
    fetches = Fetches(monkeypatch)
    checkpoint = Checkpoint("one", store)
    together = threading.Barrier(3)
    first_left = threading.Event()

    def use(leaves_first):
        with checkpoint.as_directory() as folder:
            together.wait(20)
            if not leaves_first:
                assert first_left.wait(20)
            assert read(folder) == "one"
        first_left.set()
        return folder

    with ThreadPoolExecutor(3) as threads:
        folders = [threads.submit(use, number == 0) for number in range(3)]
        assert fetches.begun.wait(20)
        fetches.go.set()
    assert fetches.count == 1
    assert len({folder.result() for folder in folders}) == 1
    assert list(place.iterdir()) == []


def test_checkpoints_are_fetched_at_the_same_time(store, place, monkeypatch):
    fetches = Fetches(monkeypatch)
    fetches.go = threading.Barrier(2)

    def use(name):
        with Checkpoint(name, store).as_directory() as folder:
            return read(folder)

    monkeypatch.setattr(fetches.go, "wait", lambda _t, wait=fetches.go.wait: wait(20) >= 0)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(use, ["one", "two"])) == ["one", "two"]
    assert list(place.iterdir()) == []


def test_a_copy_is_deleted_though_another_process_just_looks_whether_it_is_used(store, place):
    entered, leave = threading.Event(), threading.Event()

    def use():
        with Checkpoint("one", store).as_directory():
            entered.set()
            assert leave.wait(20)

    with ThreadPoolExecutor(1) as threads:
        used = threads.submit(use)
        assert entered.wait(20)
        (lock,) = place.glob("*/*.build")
        with lock.open() as looks:
            fcntl.flock(looks, fcntl.LOCK_EX)
            leave.set()
            wait([used], timeout=0.1)  # it ends only when the other one has looked
            assert not used.done()
        used.result(20)
    assert list(place.iterdir()) == []


def test_who_waits_for_a_fetch_that_fails_fetches_it_itself(store, place, monkeypatch):
    fetches = Fetches(monkeypatch)
    fetches.error = OSError("connection lost")
    checkpoint = Checkpoint("one", store)

    def use():
        with checkpoint.as_directory() as folder:
            return read(folder)

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(use) for _ in range(2)]
        assert fetches.begun.wait(20)
        fetches.go.set()
        errors = [use.exception() for use in both]
    assert sorted(map(str, errors)) == ["None", "connection lost"]
    assert fetches.count == 2
    assert list(place.iterdir()) == []


def test_files_that_were_replaced_meanwhile_are_another_copy(store, place, tmp_path):
    checkpoint = Checkpoint("one", store)
    with checkpoint.as_directory() as older:
        (tmp_path / "store" / "one" / "inner" / "weights").write_text("newer")
        with checkpoint.as_directory() as newer:
            assert (read(older), read(newer)) == ("one", "newer")
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "file", "others may write"])
def test_a_folder_that_others_may_have_made_is_not_used(store, place, tmp_path, kind):
    taken = place / f"miniray_checkpoints_{os.getuid()}"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        taken.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        taken.touch()
    else:
        taken.mkdir()
        taken.chmod(0o777)
    with Checkpoint("one", store).as_directory() as folder:
        assert read(folder) == "one"
        assert taken not in Path(folder).parents
    assert list(place.iterdir()) == [taken]


def test_what_is_in_the_memory_of_a_process_is_fetched_for_it_alone(place):
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/{place.parent.name}/inner/weights", b"mine")
    checkpoint = Checkpoint(f"/{place.parent.name}", memory)
    with checkpoint.as_directory() as one, checkpoint.as_directory() as two:
        assert (read(one), read(two)) == ("mine", "mine")
        assert one != two
    assert list(place.iterdir()) == []
