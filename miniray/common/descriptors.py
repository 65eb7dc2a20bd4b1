"""How many files this process may have open, and what to say when there are too many."""

from __future__ import annotations

import errno
import os
import resource
import sys

from miniray.exceptions import ObjectStoreFullError

#: The process, or the whole machine, has no room for another open file.
OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
#: Descriptors that values in the object store leave free, so that there are some to hand values
#: to readers, and for processes and connections.
RESERVE = 16
#: What a driver raises its limit to, as Ray does; some programs close all numbers one by one.
ENOUGH = 65536


def raise_limit(enough: int | None = None) -> None:
    """Allow as many open files as the hard limit does; most soft ones are low.

    Args:
        enough: Leave it at this number if the hard limit is higher.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if enough is None or 0 <= hard < enough else enough
    if 0 <= soft < wanted or wanted < 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether the object store has no memory for a value, or no descriptor, which is the same."""
    if isinstance(error, OSError):
        return error.errno in OUT_OF_DESCRIPTORS
    return isinstance(error, ObjectStoreFullError)


def require_room(wanted: int, purpose: str) -> None:
    """Check that so many more files can be opened.

    Args:
        wanted: How many.
        purpose: What for, to be read after "no room for".

    Raises:
        OSError: There is no room; EMFILE, with a text for the user.
    """
    count = len(os.listdir("/proc/self/fd"))
    most = limit()
    if count + wanted > most:
        raise OSError(
            errno.EMFILE,
            f"Too many open files: {count} of the {most} that this process of the node may have "
            f"leave no room for {purpose}. Raise the limit (`ulimit -n`) before the node is "
            f"started, or end what is not needed",
        )
