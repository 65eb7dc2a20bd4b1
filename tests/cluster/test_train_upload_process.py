"""Uploads to other filesystems than the machine's own happen in another process than the loop."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from miniray.train import Checkpoint, CheckpointUploadMode, report
from miniray.train.base.ranks import Ranks
from miniray.train.storage.storage import RunStorage
from miniray.train.worker import context
from miniray.train.worker.session import RankSession, SessionSetup
from miniray.train.worker.uploads import UploadProcess

# By value, a class of filesystems takes along the cache of fsspec, which can't be pickled.
IMPORTED_BY_WORKERS = True


class SigningFileSystem(DirFileSystem):
    """Writes beside each file that is put which process has done it."""

    def put(self, lpath, rpath, *args, **kwargs):
        if Path(lpath[0]).read_text() == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(lpath, rpath, *args, **kwargs)
        self.pipe_file(f"{rpath[0]}.pid", str(os.getpid()).encode())


class UnpicklableFileSystem(SigningFileSystem):
    """Holds what no other process can have."""

    def __reduce__(self):
        raise TypeError("cannot be pickled")


def run_storage(kind, tmp_path):
    (tmp_path / "bucket").mkdir(exist_ok=True)
    bucket = kind(str(tmp_path / "bucket"), LocalFileSystem(auto_mkdir=True))
    return RunStorage("runs", "run", bucket)


def checkpoint_of(tmp_path, text="weights"):
    folder = tmp_path / f"local-{text}"
    folder.mkdir(exist_ok=True)
    (folder / "model").write_text(text)
    return Checkpoint(folder)


def signer(tmp_path, name):
    return int(Path(tmp_path, "bucket", "runs", "run", name, "model.pid").read_text())


@pytest.fixture
def storage(tmp_path):
    return run_storage(SigningFileSystem, tmp_path)


@pytest.fixture
def process(storage):
    process = UploadProcess(storage)
    yield process
    process.close()


def test_all_uploads_are_made_by_one_other_process(process, tmp_path):
    for name in ("first", "second"):
        upload = process.upload(checkpoint_of(tmp_path), name)
        assert (upload.name, upload.files) == (name, {"model": 7})
    assert signer(tmp_path, "first") == signer(tmp_path, "second") != os.getpid()


def test_what_an_upload_raises_is_raised_here(process, tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        process.upload(Checkpoint(tmp_path / "missing"), "first")
    process.upload(checkpoint_of(tmp_path), "second")


def test_a_process_that_is_killed_is_told_and_the_next_upload_has_another(process, tmp_path):
    with pytest.raises(ChildProcessError, match="exit code -9"):
        process.upload(checkpoint_of(tmp_path, "deadly"), "first")
    process.upload(checkpoint_of(tmp_path), "second")


def test_memory_is_written_by_the_process_that_has_it(tmp_path):
    storage = RunStorage("/runs-of-upload-process", "run", MemoryFileSystem())
    process = UploadProcess(storage)
    process.upload(checkpoint_of(tmp_path), "first")
    assert storage.files.read("first/model") == "weights"
    storage.files.delete_folder("")


def test_a_filesystem_that_cannot_be_pickled_is_used_where_it_is_and_the_user_told(
    tmp_path, caplog
):
    process = UploadProcess(run_storage(UnpicklableFileSystem, tmp_path))
    for name in ("first", "second"):
        process.upload(checkpoint_of(tmp_path), name)
        assert signer(tmp_path, name) == os.getpid()
    [told] = caplog.messages
    assert "may slow it down" in told
    assert "TypeError: cannot be pickled" in told


def test_the_process_ends_with_the_thread_that_uploads(process, tmp_path):
    thread = threading.Thread(target=process.upload, args=(checkpoint_of(tmp_path), "first"))
    thread.start()
    thread.join()
    assert process._process.wait(30) == -signal.SIGKILL


class Controller:
    """Takes the calls of a session."""

    def __init__(self):
        self.calls = []

    def __call__(self, method, *args):
        self.calls.append((method, args))
        answer = concurrent.futures.Future()
        answer.set_result(args[3] if method == "begin_upload" else None)
        return answer


@pytest.fixture
def session(storage):
    storage.write_run_facts({"token": "token"})
    setup = SessionSetup(storage, "token", 1, 0, None)
    session = RankSession(setup, Ranks(0, 1, 0, 1, 0), Controller())
    context.set_session(session)
    yield session
    context.set_session(None)
    session.close()


def test_an_upload_in_the_background_leaves_the_process_of_the_loop(session, tmp_path):
    asynchronous = CheckpointUploadMode.ASYNC
    report({}, checkpoint_of(tmp_path), checkpoint_upload_mode=asynchronous)
    session.finish()
    assert signer(tmp_path, "checkpoint_000000") != os.getpid()
    assert not (tmp_path / "local-weights").exists()


def test_an_upload_whose_process_is_killed_fails_the_rank(session, tmp_path):
    deadly = checkpoint_of(tmp_path, "deadly")
    report({}, deadly, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    with pytest.raises(ChildProcessError, match="exit code -9"):
        session.finish()


def test_an_upload_that_the_loop_waits_for_is_made_by_its_process(session, tmp_path):
    report({}, checkpoint_of(tmp_path))
    assert signer(tmp_path, "checkpoint_000000") == os.getpid()


def test_a_process_that_ends_does_not_wait_for_uploads():
    program = """
import threading
from miniray.train.worker.uploads import BackgroundUploads
begun = threading.Event()
BackgroundUploads().submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
