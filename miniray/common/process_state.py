"""Processes: what the kernel reports of them, their limits, and how a new interpreter is started.

Reads below /proc so that a process that hangs does not hang its reader. One that hangs in a driver
may hold the lock of its memory, for which a reader of its environment or command line waits;
``stat`` takes none.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import select
import signal
import sys

from miniray.common.names import printable
from miniray.exceptions import ObjectStoreFullError

#: On this signal a worker writes its stacks into its file, which the kernel shows by this name.
SHOW_STACKS = signal.SIGRTMIN + 11
WORKER_FILE = "miniray-worker"
#: Where the kernel shows its processes.
_PROC = "/proc"
#: Flags of a thread that has begun to end, and of one of the kernel's own (PF_EXITING and
#: PF_KTHREAD in linux/sched.h).
_EXITING, _OF_KERNEL = 0x4, 0x200000
_KILLED = 1 << (signal.SIGKILL - 1)
#: Places in stat after the name, from proc(5): state, flags, start time in clock ticks, signals
#: pending for the thread, and the addresses between which its command line is, and at which its
#: environment ends.
STATE, _FLAGS, START, _PENDING = 0, 6, 19, 28
_ARGUMENTS, _ARGUMENTS_END, _ENVIRONMENT_END = 45, 46, 48


def is_dying(pid: int) -> bool:
    """Return whether a process has begun to end, or was killed, and is not gone.

    Most are gone a moment later. One that is not hangs on its way, maybe with its files open.
    """
    fields = stat_of(pid)
    if fields is None:
        return False
    # A fatal signal to a process is put down for each of its threads.
    return bool(int(fields[_FLAGS]) & _EXITING or int(fields[_PENDING]) & _KILLED)


def may_hang_readers(pid: int) -> bool:
    """Return whether a thread of a process waits in the kernel: it may hold the memory's lock."""
    try:
        threads = os.listdir(f"{_PROC}/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return False
    stats = (stat_of(f"{pid}/task/{thread}") for thread in threads)
    return any(fields is not None and fields[STATE] == "D" for fields in stats)


def variable_of(pid: int, name: str) -> str | None:
    """Return a variable of the environment that a process was started with, or None.

    Raises:
        BlockingIOError: it is on its way into a new program (execve), which has no environment yet.
            That takes it well under a millisecond, or as long as the disk takes.
        OSError: it is gone, or its environment may not be read.
    """
    # An empty one is looked at again: the new program may have got its own in between.
    environment = _environment(pid) or _environment(pid)
    prefix = f"{name}=".encode()
    for variable in environment.split(b"\0"):
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode("utf-8", "replace")
    return None


def command_of(pid: int) -> list[str]:
    """Return a process's command line; empty if it has ended, hides it, or hangs in the kernel."""
    if may_hang_readers(pid):
        return []
    try:
        with open(f"{_PROC}/{pid}/cmdline", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.removesuffix("\0").split("\0") if text else []


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process; none of one that is gone."""
    children: list[int] = []
    try:
        threads = os.listdir(f"{_PROC}/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return children
    for thread in threads:
        # A thread may end between the two looks.
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            open(f"{_PROC}/{pid}/task/{thread}/children", encoding="ascii") as file,
        ):
            children.extend(map(int, file.read().split()))
    return children


def ends_within(pid: int, seconds: float | None) -> bool:
    """Wait for the end of a child, and leave it to be reaped; None: as long as it takes.

    ``Popen.wait`` with a limit looks every 50 ms.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it was waited for elsewhere
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(None if seconds is None else 1000 * seconds))
    finally:
        os.close(descriptor)


def hide_argument(text: str) -> None:
    """Blot a text out of this process's command line, which all users of the machine can read."""
    import ctypes

    fields = stat_of("self")
    assert fields is not None
    begin, end = int(fields[_ARGUMENTS]), int(fields[_ARGUMENTS_END])
    place = ctypes.string_at(begin, end - begin).find(os.fsencode(text))
    if text and place >= 0:
        ctypes.memset(begin + place, ord("*"), len(os.fsencode(text)))


def set_title(what: str) -> None:
    """Make ``ps``, ``top`` and ``nvidia-smi`` show this process as ``miniray: WHAT``.

    Its command line is written over; the kernel shows one whose last byte is no NUL up to its first
    NUL. ``top`` shows 15 bytes.
    """
    import ctypes

    text = f"miniray: {printable(what)}".encode()
    with contextlib.suppress(OSError), open(f"{_PROC}/self/comm", "wb", buffering=0) as file:
        file.write(text[:15])
    begin, end = _command_line()
    room = end - begin - 2
    if room > 0:
        ctypes.memmove(begin, text[:room].ljust(room, b"\0") + b"\0.", room + 2)


@functools.cache  # forks have theirs at the same place
def _command_line() -> tuple[int, int]:
    """Return where the arguments of this process begin and end in its memory."""
    fields = stat_of("self")
    return (0, 0) if fields is None else (int(fields[_ARGUMENTS]), int(fields[_ARGUMENTS_END]))


def _environment(pid: int) -> bytes:
    with open(f"{_PROC}/{pid}/environ", "rb") as file:
        environment = file.read()
    if not environment:
        _require_program(pid)
    return environment


def _require_program(pid: int) -> None:
    """Raise OSError if a process has left its program: for the next one, or for good."""
    fields = stat_of(pid)
    if fields is None or int(fields[_FLAGS]) & _EXITING:
        raise ProcessLookupError(f"Process {pid} has ended.")
    if fields[_ENVIRONMENT_END] == "0" and not int(fields[_FLAGS]) & _OF_KERNEL:
        raise BlockingIOError(f"Process {pid} is on its way into a new program.")


def stat_of(process: int | str) -> list[str] | None:
    """Return the fields of a process's ``stat`` after its name; None if there is no such process.

    Args:
        process: A pid, or ``PID/task/TID`` for a thread.
    """
    try:
        with open(f"{_PROC}/{process}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may contain anything.
    return text.split(")")[-1].split()


_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def python_command(module: str) -> str:
    """Return the text for ``python -c`` that runs ``main`` of a module of miniray.

    The current folder is left out of sys.path: a file of the user's may not shadow a module.
    The garbage collector pauses during the imports: it would take a tenth of the time.
    """
    return (
        "import gc, sys; gc.disable(); sys.path = [p for p in sys.path if p];"
        f"{_PACKAGE_PARENT!r} in sys.path or sys.path.append({_PACKAGE_PARENT!r});"
        f"from {module} import main; gc.freeze(); gc.enable(); main()"
    )


#: The process, or the whole machine, may open no further file.
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


def require_descriptors(wanted: int, purpose: str) -> None:
    """Check that ``wanted`` more files can be opened.

    Args:
        wanted: How many.
        purpose: To be read after "which leaves none for".

    Raises:
        OSError: EMFILE, with a text for the user.
    """
    count = len(os.listdir("/proc/self/fd"))
    most = limit()
    if count + wanted > most:
        raise OSError(
            errno.EMFILE,
            f"Too many open files: this process of the node has {count} of at most {most} open, "
            f"which leaves none for {purpose}. Raise the limit (`ulimit -n`) before the node is "
            f"started, or end what is not needed",
        )


_THREADS_VARIABLE = "OMP_NUM_THREADS"

#: The variable that OpenBLAS prefers, and how its builds call the function that sets the number.
_OPENBLAS_VARIABLE = "OPENBLAS_NUM_THREADS"
_OPENBLAS_SET = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)

#: What this process has set the variable to; None if it has not.
_threads_set: str | None = None


def limit_threads(cpus: float) -> None:
    """Let numerical libraries start as many threads as the task or actor has CPUs, at least one.

    That is Ray's rule: one where ``num_cpus`` is not given, as else each of many workers would
    start one for every processor of the machine. ``OMP_NUM_THREADS``, set for the node or in a
    ``runtime_env``, overrides it.
    """
    global _threads_set
    if not threads_given():
        count = max(1, int(cpus))
        # Libraries read it when they are loaded; these may be loaded already.
        _threads_set = os.environ[_THREADS_VARIABLE] = str(count)
        # User code may be loading it just now, in a thread of its own: it has no such function yet.
        set_number = getattr(sys.modules.get("torch"), "set_num_threads", None)
        if set_number is not None:
            set_number(count)
    _limit_openblas()


def _limit_openblas() -> None:
    """Set the threads of NumPy's OpenBLAS as the variables say: a template may have loaded it."""
    modules = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")
    found = next(filter(None, map(sys.modules.get, modules)), None)
    file = getattr(found, "__file__", None)
    given = os.environ.get(_OPENBLAS_VARIABLE) or os.environ.get(_THREADS_VARIABLE, "")
    if file is None or not given.isdecimal():
        return
    import ctypes

    library = ctypes.CDLL(file)  # symbols of the libraries that it needs are found too
    for name in _OPENBLAS_SET:
        if (set_number := getattr(library, name, None)) is not None:
            set_number(int(given))
            return


def threads_given() -> bool:
    """Return whether the user has set the number of threads."""
    return os.environ.get(_THREADS_VARIABLE) != _threads_set
