"""How user code is ended: a task by a signal that raises in the main thread, and processes.

Which work is cancelled, and when it may be interrupted, the executor says (``executor.py``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, NoReturn

from miniray.common.process_state import children_of
from miniray.exceptions import TaskCancelledError
from miniray.messages.value import ActorExit
from miniray.wire.interrupts import postpone
from miniray.worker import stdio

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from miniray.wire.io_loop import IOLoop
    from miniray.worker.work import Work

#: Interrupts the main thread when the running task is cancelled.
CANCEL_SIGNAL = signal.SIGUSR1
#: The name of the frame in which a module is run.
_MODULE = "<module>"
#: Seconds until it is sent again if it had no effect, at first and at most.
_AGAIN, _AGAIN_AT_MOST = 0.02, 1.0


class Interruption:
    """What runs in the main thread, and whether a cancel may raise there."""

    def __init__(self, loop: IOLoop) -> None:
        self._loop = loop
        self.running: Work | None = None
        #: Whether the user's code runs, which may be interrupted.
        self.allowed = False
        #: The main thread is in the hook for exceptions that Python ignores: what is raised there
        #: goes nowhere, too.
        self.in_hook = False
        #: What was raised last to end the running task.
        self._raised: KeyboardInterrupt | None = None

    def end(self) -> None:
        """Note that nothing runs."""
        self.running = None
        self._raised = None  # its frames hold the arguments

    def send(self, work: Work, pause: float = _AGAIN) -> None:
        """Interrupt the main thread while it runs that, and again until that has had effect.

        A signal that comes when the thread is about to sleep, as in the wait for a lock, does not
        wake it, and Python's handler runs when the sleep is over.
        """
        if self.running is work and self.allowed:
            signal.pthread_kill(threading.main_thread().ident or 0, CANCEL_SIGNAL)
            again = min(2 * pause, _AGAIN_AT_MOST)
            self._loop.call_later(pause, lambda: self.send(work, again))

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise in the running task, if it is cancelled (CANCEL_SIGNAL)."""
        running = self.running
        if running is not None and running.execution.cancelled and self.allowed:
            if self.in_hook or postpone(self.on_signal, number, frame):
                return  # from the hook it goes on being sent
            self.allowed = False
            running.execution.interrupted()
            # As in Ray, so that user code can clean up.
            self._raised = KeyboardInterrupt()
            raise self._raised

    def was_ignored(self, error: BaseException | None) -> bool:
        """Return whether an exception that Python ignored was to end a task; send it again.

        What a ``__del__`` or the callback of a weak reference raises goes nowhere, also if it was
        a signal's handler that raised in the middle of it. The caller is in the hook for that,
        and clears ``in_hook`` last.
        """
        work = self.running
        if work is None or error is None or error is not self._raised:
            return False
        self.in_hook = True
        self._raised = None
        self.allowed = True
        self._loop.call_later(_AGAIN, lambda: self.send(work))
        return True

    def cut_off_import(self, error: BaseException) -> bool:
        """Return whether an error is the end of a task in the middle of an import.

        Of a package whose import was cut off some modules stay, and those in native code cannot be
        loaded once more: NumPy, for one, is not to be had in such a process any more.
        """
        return error is self._raised and any(
            frame.f_code.co_name == _MODULE  # Python hides the frames of its own that import it
            for frame, _ in traceback.walk_tb(error.__traceback__)
        )

    @contextlib.contextmanager
    def put_off(self, work: Work) -> Iterator[None]:
        """Keep a cancel out: between a value and its message, it would leak the value.

        Raises:
            TaskCancelledError: it came; behind what was put off for.
        """
        allowed, self.allowed = self.allowed, False
        yield
        self.allowed = allowed  # first: a cancel is either seen here, or interrupts
        if work.execution.cancelled:
            raise TaskCancelledError(work.name)


def exit_code(why: SystemExit) -> int:
    """Return the exit code that is asked for; write what is no number to stderr, as Python does.

    That text, as of ``sys.exit("no such file")``, is often all that says why.
    """
    if why.code is None:
        return 0
    if isinstance(why.code, int):
        return why.code
    print(why.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1


def end_child(why: BaseException | None) -> NoReturn:
    """End a forked child as an interpreter would, but for exit functions, which are its parent's.

    Args:
        why: What came out of the function in which it was forked; None: it returned.
    """
    code = 0
    if isinstance(why, SystemExit):
        code = exit_code(why)
    elif why is not None and not isinstance(why, ActorExit):
        traceback.print_exception(why)
        code = 1
    stdio.flush_all()
    os._exit(code & 0xFF)


def kill_descendants() -> None:
    """Kill all processes below this one. Opens /proc only: safe in any thread."""
    pending = [os.getpid()]
    found: list[int] = []
    while pending:
        for child in children_of(pending.pop()):
            found.append(child)
            pending.append(child)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
