"""What a process of training that is killed leaves, and what others learn of its end."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from checkpoint_store import store_of_two

from miniray.train import Checkpoint
from miniray.train.worker.local_link import LinkServer

PROGRAM = """
import os, signal, sys
from miniray.train.worker.local_link import LinkClient

client = LinkClient(("127.0.0.1", int(sys.argv[1])), b"secret of the run", 1, 30)
child = os.fork()
if child == 0:
    signal.pause()
client.ask("child", child).result(30)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_of_a_rank_does_not_hide_that_the_rank_was_killed():
    children, lost = [], queue.SimpleQueue()

    def answer(rank, kind, child):
        children.append(child)
        told = concurrent.futures.Future()
        told.set_result(None)
        return told

    listener = socket.create_server(("127.0.0.1", 0))
    link = LinkServer(listener, b"secret of the run", 60)
    link.serve(answer, lost.put)
    command = [sys.executable, "-c", PROGRAM, str(listener.getsockname()[1])]
    with subprocess.Popen(command) as process:
        try:
            assert lost.get(timeout=60) == 1
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            process.kill()
    link.close()


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


def read(folder):
    return Path(folder, "inner", "weights").read_text()


def fetch_and_die(checkpoint):
    with checkpoint.as_directory():
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_has_left_is_not_used_and_deleted_by_the_next_one(
    store, place, tmp_path
):
    one, two = Checkpoint("one", store), Checkpoint("two", store)
    process = multiprocessing.get_context("fork").Process(target=fetch_and_die, args=(one,))
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    (left,) = place.iterdir()
    (copy,) = (path for path in left.iterdir() if path.is_dir())
    (copy / "inner" / "weights").write_text("half")
    with one.as_directory() as folder:
        assert read(folder) == "one"
    assert list(place.iterdir()) == []

    process = multiprocessing.get_context("fork").Process(target=fetch_and_die, args=(one,))
    process.start()
    process.join(20)
    with two.as_directory() as folder:
        assert read(folder) == "two"
    assert list(place.iterdir()) == []


def test_a_process_that_ends_does_not_wait_for_uploads():
    program = """
import threading
from miniray.train.worker.session import BackgroundUploads
begun = threading.Event()
BackgroundUploads().submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
