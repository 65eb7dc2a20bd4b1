"""How many files this process may have open, and how many threads numerical libraries start."""

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
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether the object store lacks memory or a descriptor for a value."""
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
            f"Too many open files: this process of the node has {count} of at most {most} open, "
            f"which leaves no room for {purpose}. Raise the limit (`ulimit -n`) before the node is "
            f"started, or end what is not needed",
        )


_THREADS_VARIABLE = "OMP_NUM_THREADS"

#: What this process has set the variable to; None if it has not.
_threads_set: str | None = None


def limit_threads(cpus: float) -> None:
    """Let numerical libraries start as many threads as the task or actor has CPUs, at least one.

    That is Ray's rule: one where ``num_cpus`` is not given, as else each of many workers would
    start one for every processor of the machine. ``OMP_NUM_THREADS``, set for the node or in a
    ``runtime_env``, overrides it.
    """
    global _threads_set
    if threads_given():
        return
    count = max(1, int(cpus))
    # Libraries read it when they are loaded; this one may be loaded already.
    _threads_set = os.environ[_THREADS_VARIABLE] = str(count)
    # User code may be loading it just now, in a thread of its own: it has no such function yet.
    set_number = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_number is not None:
        set_number(count)


def threads_given() -> bool:
    """Return whether the user has set the number of threads."""
    return os.environ.get(_THREADS_VARIABLE) != _threads_set
