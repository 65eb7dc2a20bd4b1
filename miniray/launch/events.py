"""What a run waits for: signals, ends of processes, the end of the connection that it lives by."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Signals with which schedulers and users end a run.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: After which a program has the grace to end; after Ctrl-C, as long as it likes.
DEADLY = (signal.SIGTERM, signal.SIGHUP)
#: Signals for the program only: a warning of the scheduler's, for example.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
#: In a byte of the pipe that ``note`` has written: other bytes are of the interpreter, which only
#: ends the wait with them, as the handler of a signal may not have run yet.
_NOTED = 0x80


class StoppedError(Exception):
    """A signal came before there was anything to end in order."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Events:
    """Signals, which are noted or interrupt, and descriptors that become readable."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._interrupts = True
        self._selector = selectors.PollSelector()
        self._selector.register(reader, selectors.EVENT_READ)

    def collect(self) -> None:
        """Note signals from now on: there is something to end in order."""
        self._interrupts = False

    def note(self, number: int, _frame: Any = None) -> None:
        """Handle a signal; or do as if it came, where something else is to end the run."""
        if not self._interrupts:
            with contextlib.suppress(BlockingIOError):
                os.write(self._writer, bytes([number | _NOTED]))
        elif number in ENDING:
            raise StoppedError(number)

    def when_readable(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call ``handler`` in ``wait`` whenever there is something to read."""
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def when_ended(self, pid: int, handler: Callable[[], object]) -> None:
        """Call ``handler`` in ``wait`` once a child has ended."""
        descriptor = os.pidfd_open(pid)

        def ended() -> None:
            self.forget(descriptor)
            os.close(descriptor)
            handler()

        self.when_readable(descriptor, ended)

    def forget(self, descriptor: int) -> None:
        """Look at a descriptor no more."""
        self._selector.unregister(descriptor)

    def wait(self, until: float | None) -> list[int]:
        """Wait until something happens, or until a time; return the signals that have come."""
        came = b""
        for key, _ in self._selector.select(None if until is None else until - time.monotonic()):
            if key.fd == self._reader:
                came = os.read(self._reader, 512)
            else:
                key.data()
        return [byte - _NOTED for byte in came if byte & _NOTED]


@contextlib.contextmanager
def events(*, last: bool = False) -> Iterator[Events]:
    """Take signals as events meanwhile. A signal that is ignored stays so, as nohup has it.

    Args:
        last: This process exits then, with a code that a late signal must not change.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    found = Events(reader, writer)
    wanted = [n for n in (*ENDING, *PASSED_ON) if signal.getsignal(n) is not signal.SIG_IGN]
    before = [signal.signal(number, found.note) for number in wanted]
    # Without it, a signal right before the system call of ``wait`` would not end that.
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield found
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, signal.SIG_IGN if last else handler)
        signal.set_wakeup_fd(woken)
        os.close(reader)
        os.close(writer)


def run_below_init(work: Callable[[], int]) -> int:
    """Return what ``work`` does; in a child process, if this one is the first of a container.

    Nothing but the first process can reap the orphans of a container, and ``work`` waits for
    children of its own.
    """
    if os.getpid() != 1:
        return work()
    child = os.fork()
    if child == 0:
        return work()

    def pass_on(number: int, _frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (*ENDING, *PASSED_ON):
        signal.signal(number, pass_on)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
