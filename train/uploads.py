"""Uploads checkpoints in the background, one after the other, in the order given."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: A train loop that is so many checkpoints ahead of the storage waits: each is on local disk.
MAX_PENDING = 8


class BackgroundUploads:
    """The uploads of one rank. After one has failed, those behind it are not begun."""

    def __init__(self) -> None:
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._room = threading.BoundedSemaphore(MAX_PENDING)
        self._last: concurrent.futures.Future[None] | None = None
        self._failure: BaseException | None = None

    def submit(self, upload: Callable[[], None]) -> None:
        """Begin an upload as soon as those before it have ended; wait if too many are pending."""
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(
                1, thread_name_prefix="train-upload"
            )
        self._room.acquire()
        self._last = self._thread.submit(self._run, upload)

    def raise_failure(self) -> None:
        """Raise why an upload failed, if one did."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Wait until all have ended; raise why one failed, if one did."""
        if self._last is not None:
            self._last.result()
        self.raise_failure()

    def close(self, *, wait: bool = False, cancel: bool = True) -> None:
        """Take no more of them; those that go on are waited for if so wished.

        Args:
            wait: Return when they have ended.
            cancel: Only the one that runs goes on.
        """
        if self._thread is not None:
            self._thread.shutdown(wait=wait, cancel_futures=cancel)

    def _run(self, upload: Callable[[], None]) -> None:
        try:
            if self._failure is None:
                upload()
        except BaseException as error:  # noqa: BLE001 - raised in the train loop's thread
            self._failure = error
        finally:
            self._room.release()
