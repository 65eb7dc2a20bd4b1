"""Giving memory and disk back to the kernel, which takes long for much: 50 ms for 256 MiB.

It is done in a thread of its own, which never waits for a slow disk to write.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import functools
import logging
import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2


class Free(Protocol):
    """How something is given back."""

    def __call__(self, work: Callable[[], object], done: Callable[[], object]) -> None:
        """Do some work somewhere, then call ``done`` here, whatever came of it."""


def at_once(work: Callable[[], object], done: Callable[[], object]) -> None:
    """The same here and now."""
    work()
    done()


class Freeing:
    """The thread."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="miniray-free")

    def __call__(self, work: Callable[[], object], done: Callable[[], object]) -> None:
        """Do some work in the thread, then call ``done`` in the loop, whatever came of it."""

        def ended(future: asyncio.Future[object]) -> None:
            if not future.cancelled() and future.exception() is not None:
                logger.error("could not give memory back", exc_info=future.exception())
            done()

        try:
            future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RuntimeError:  # the node ends: there is no thread any more
            work()
            done()
            return
        future.add_done_callback(ended)

    async def done(self) -> None:
        """Wait until all of the work so far is done."""
        over = asyncio.get_running_loop().create_future()
        self(lambda: None, functools.partial(over.set_result, None))
        await over

    def close(self) -> None:
        """Take no more work. What is under way is done before the process ends."""
        self._thread.shutdown(wait=False)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give part of a file, or of memory, back; it reads as zeros from then on.

    Raises:
        OSError: the file system cannot do that.
    """
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if _libc().fallocate(fd, mode, offset, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
