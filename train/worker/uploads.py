"""Uploads in the background, one after the other in the order given, in a thread."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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
