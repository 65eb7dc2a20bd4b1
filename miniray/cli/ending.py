"""Ending the processes of nodes, and waiting for it, by pidfd.

A signal goes only to the very process that was recorded, never to a later one with the
same pid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.system.session import ProcessId, remove_session, session_processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from miniray.system.session import ClusterRecord

#: How often processes that appear while others are killed are looked for again.
_KILL_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Ended:
    """What became of one node's processes."""

    record: ClusterRecord
    #: How many ended, the killed ones included.
    ended: int
    #: Pids that had to be killed.
    killed: list[int]
    #: Pids that even SIGKILL did not end.
    left: list[int]


class _Processes:
    """Handles on running processes, until they end."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._running: dict[int, ProcessId] = {}  # by pidfd
        self._seen: set[ProcessId] = set()

    @property
    def running(self) -> set[ProcessId]:
        """Those that have not ended."""
        return set(self._running.values())

    @property
    def ended(self) -> set[ProcessId]:
        """Those that have."""
        return self._seen - self.running

    def add(self, processes: Iterable[ProcessId]) -> None:
        """Take hold of processes, as far as they still run."""
        for process in set(processes) - self._seen:
            if process.pid == os.getpid():
                continue
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            self._stack.callback(os.close, descriptor)
            if process.alive():  # the pidfd is of this very process, not of a later one
                self._running[descriptor] = process
                self._seen.add(process)

    def send(self, number: signal.Signals, to: Iterable[ProcessId]) -> None:
        """Send a signal to those of these processes that run."""
        wanted = set(to)
        for descriptor, process in self._running.items():
            if process in wanted:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    signal.pidfd_send_signal(descriptor, number)

    def wait(self, seconds: float) -> None:
        """Wait until all have ended, at most this long."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        for descriptor in self._running:
            poll.register(descriptor, select.POLLIN)
        while self._running:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            for descriptor, _events in ready:
                poll.unregister(descriptor)
                del self._running[descriptor]
            if not ready:
                return


def end_nodes(
    records: Sequence[ClusterRecord], *, force: bool = False, grace: float | None = None
) -> list[Ended]:
    """End nodes with all their processes and remove what they leave, but their logs.

    Args:
        records: The nodes, all ended at the same time.
        force: Kill at once instead of asking first.
        grace: Seconds that they may take when asked; None: twice ``stop_grace``, as a
            node gives its workers that much.
    """
    if grace is None:
        grace = 2 * config().stop_grace
    with contextlib.ExitStack() as stack:
        handles = [_Processes(stack) for _ in records]
        for record, processes in zip(records, handles, strict=True):
            processes.add([*record.living(), *session_processes(record.session.id)])
            if not force:
                processes.send(signal.SIGTERM, _whom_to_ask(record, processes))
        if not force:
            deadline = time.monotonic() + grace
            for processes in handles:
                processes.wait(deadline - time.monotonic())
        return [
            _finish(record, processes) for record, processes in zip(records, handles, strict=True)
        ]


def _whom_to_ask(record: ClusterRecord, processes: _Processes) -> Iterable[ProcessId]:
    """Return the process that ends the others, or all of them when that one is gone."""
    boot = record.processes.get("boot")
    return [boot] if boot is not None and boot in processes.running else processes.running


def _finish(record: ClusterRecord, processes: _Processes) -> Ended:
    """Kill what is left, and remove the session's files when nothing is."""
    killed: set[ProcessId] = set()
    for _ in range(_KILL_ROUNDS):
        processes.add(session_processes(record.session.id))
        if not processes.running:
            break
        killed |= processes.running
        processes.send(signal.SIGKILL, processes.running)
        processes.wait(config().stop_grace)
    if not processes.running:
        remove_session(record.session)
    return Ended(
        record=record,
        ended=len(processes.ended),
        killed=sorted(process.pid for process in killed & processes.ended),
        left=sorted(process.pid for process in processes.running),
    )


class StopRequests:
    """Ctrl-C, SIGTERM and SIGHUP: first they interrupt, after ``collect`` they are only noted."""

    def __init__(self, reader: int, writer: int) -> None:
        #: Readable once there was a request.
        self.descriptor = reader
        self._writer = writer
        self._interrupts = True

    def collect(self) -> None:
        """Only note requests from now on: there is something to end first."""
        self._interrupts = False

    def note(self, _number: int, _frame: Any) -> None:
        """Handle the signal."""
        if self._interrupts:
            raise KeyboardInterrupt
        with contextlib.suppress(BlockingIOError):  # full of earlier requests
            os.write(self._writer, b"\0")


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Take Ctrl-C, SIGTERM and the end of the terminal as requests meanwhile."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else it is to outlive the terminal
        numbers.append(signal.SIGHUP)
    requests = StopRequests(reader, writer)
    before = [signal.signal(number, requests.note) for number in numbers]
    try:
        yield requests
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def wait_for_end(process: ProcessId, requested: int) -> bool:
    """Wait until a process ends or the descriptor is readable; say whether it was the latter."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        stack.callback(os.close, descriptor)
        if not process.alive():
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(requested, select.POLLIN)
        return requested in {ready for ready, _events in poll.poll()}
