"""Uploads in the background, one after the other in the order given: in a thread, and a process.

The clients of object stores are written in Python. In a thread of the rank they would compete
with the train loop for Python's lock, which a loop of small operations asks for all the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING

from miniray.common.process_state import python_command
from miniray.train.base.failures import WorkerFailure
from miniray.train.storage.filesystem import in_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.base.reports import Upload
    from miniray.train.storage.checkpoint import Checkpoint
    from miniray.train.storage.storage import RunStorage

logger = logging.getLogger(__name__)

#: A train loop that is so many checkpoints ahead of the storage waits: each is on local disk.
MAX_PENDING = 8


class BackgroundUploads:
    """The uploads of one rank. After one has failed, those behind it are not begun.

    A process does not wait for them when it ends: call ``wait`` before that.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._room = threading.BoundedSemaphore(MAX_PENDING)
        #: None ends the thread.
        self._pending: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = self._cancelled = False
        self._failure: BaseException | None = None

    def submit(self, upload: Callable[[], None]) -> None:
        """Begin an upload as soon as those before it have ended; wait if too many are pending.

        Raises:
            RuntimeError: No more are taken.
        """
        if self._closed:
            raise RuntimeError("No checkpoint is uploaded any more: the train loop is over.")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="train-upload", daemon=True)
            self._thread.start()
        self._room.acquire()
        self._pending.put(upload)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Take no more, wait until all have ended; raise why one failed, if one did."""
        self.close(wait=True, cancel=False)
        self.raise_failure()

    def close(self, *, wait: bool = False, cancel: bool = True) -> None:
        """Take no more of them; those that go on are waited for if so wished.

        Args:
            wait: Return when they have ended.
            cancel: Only the one that runs goes on.
        """
        self._closed = True
        self._cancelled = self._cancelled or cancel
        if self._thread is not None:
            self._pending.put(None)
            if wait:
                self._thread.join()

    def _run(self) -> None:
        while (upload := self._pending.get()) is not None:
            self._end(upload)
            self._room.release()

    def _end(self, upload: Callable[[], None]) -> None:
        try:
            if self._failure is None and not self._cancelled:
                upload()
        except BaseException as error:  # noqa: BLE001 - raised in the train loop's thread
            self._failure = error


_PR_SET_PDEATHSIG = 1
#: The train loop goes before the upload where both want a processor.
_NICENESS = 10


class UploadProcess:
    """The process that uploads for one rank, one upload after the other; started with the first.

    It ends at the latest with the thread that called ``upload`` first.
    """

    def __init__(self, storage: RunStorage) -> None:
        self._storage = storage
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._told = False

    def upload(self, checkpoint: Checkpoint, name: str) -> Upload:
        """``RunStorage.upload``, in that process.

        What no other process can reach is uploaded in this one: memory, and a filesystem or
        checkpoint that can't be pickled.

        Raises:
            ChildProcessError: The process ended before the upload did.
        """
        import cloudpickle

        if in_memory(self._storage.filesystem) or in_memory(checkpoint.fsspec_filesystem):
            return self._storage.upload(checkpoint, name)
        try:
            request = cloudpickle.dumps((self._storage, checkpoint, name))
        except Exception as error:  # noqa: BLE001 - whatever a user's class raises
            self._tell_unsent(error)
            return self._storage.upload(checkpoint, name)
        answer = self._ask(pickle.dumps((sys.path, request)))
        if isinstance(answer, WorkerFailure):
            raise answer.exception()
        return answer

    def _tell_unsent(self, error: Exception) -> None:
        if self._told:
            return
        self._told = True
        logger.warning(
            "Checkpoints are uploaded in the process of the train loop, and may slow it down: the "
            "filesystem can't be given to another process (%s: %s).",
            type(error).__name__,
            error,
        )

    def close(self) -> None:
        """End the process; nothing may be under way."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def _ask(self, request: bytes) -> Upload | WorkerFailure:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._connection is not None
        try:
            self._connection.send_bytes(request)
            answer: Upload | WorkerFailure = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            code = self._process.wait()
            self.close()  # the next upload starts another one
            raise ChildProcessError(
                f"The process that uploads checkpoints ended with exit code {code}."
            ) from error
        return answer

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-c", python_command(__name__), str(number)]
            self._process = subprocess.Popen(
                [*command, str(os.getpid())], stdin=subprocess.DEVNULL, pass_fds=[number]
            )


def main() -> None:
    """Upload what the parent asks for, until it hangs up."""
    number, parent = (int(word) for word in sys.argv[-2:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C lets uploads that have begun end
    with Connection(number) as connection, contextlib.suppress(EOFError):
        while True:
            connection.send_bytes(_answer(connection.recv_bytes()))


def _answer(request: bytes) -> bytes:
    """Return the pickled outcome of an upload: what it has put where, or why it failed."""
    try:
        sys.path[:], inner = pickle.loads(request)
        storage, checkpoint, name = pickle.loads(inner)
        return pickle.dumps(storage.upload(checkpoint, name))
    except Exception as error:  # noqa: BLE001 - raised by who asked
        return pickle.dumps(WorkerFailure.of(error))
