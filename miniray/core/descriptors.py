"""How many files this process may have open, and what to say when there are too many."""

from __future__ import annotations

import errno
import os
import resource

#: The process, or the whole machine, has no room for another open file.
OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


def raise_limit() -> None:
    """Allow as many open files as the hard limit does, as Ray does: most soft ones are low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """How many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


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
