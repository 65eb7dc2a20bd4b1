"""What this process has open, for tests that nothing stays open."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import gc
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def open_files() -> collections.Counter[str]:
    """How often each file, socket, pipe or memory is open.

    The difference of two of these is what was opened in between: other tests in this
    process may leave threads and garbage that close theirs at any time.
    """
    gc.collect()
    return _count("")


def open_memory() -> int:
    """How many pieces of a store's memory are open."""
    return _count("/memfd:miniray").total()


def limit_memory(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Let a store have descriptors for so many pieces of memory more than are open now."""
    most, create = open_memory() + more, os.memfd_create

    def limited(name: str, flags: int) -> int:
        if open_memory() >= most:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", limited)


def _count(prefix: str) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of this very listing
            target = os.readlink(f"/proc/self/fd/{fd}")
            found[target] += target.startswith(prefix)
    return +found


def locked_files(root: Path) -> list[str]:
    """The suffixes of lock files in a folder that somebody holds."""
    busy = []
    for path in [*root.glob("*.build"), *root.glob("*.use")]:
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                busy.append(path.suffix)
    return busy
