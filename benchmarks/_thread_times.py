"""The processor time of a process by thread, so that an engine's threads can be told from others.

A thread is known by its label: Python's name for it, or the system's.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from pathlib import Path

#: The label of the thread that looks, which runs the train loop. In Ray it is not the main one.
TRAINS = "trains"
#: The label of native threads that have no name of their own, such as those of OpenMP.
UNNAMED = "unnamed"

Times = dict[str, float]


def thread_times() -> Times:
    """Processor seconds of this process so far, by label; threads of a label are summed up.

    Those of threads that have ended are in the sum of ``time.process_time()`` only.
    """
    names = {
        thread.native_id: thread.name
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }
    # Not what the thread's object says, which after a fork is the number in the parent.
    names[os.getpid()] = "MainThread"
    trains = threading.get_native_id()
    names[trains] = TRAINS
    unnamed = Path(f"/proc/self/task/{trains}/comm").read_text().strip()
    times: Times = collections.defaultdict(float)
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            # Nanoseconds on a processor: the first field (Linux, Documentation/scheduler).
            seconds = int((folder / "schedstat").read_text().split()[0]) / 1e9
            own = (folder / "comm").read_text().strip()
            label = names.get(int(folder.name)) or (UNNAMED if own == unnamed else own)
            times[label] += seconds
    return dict(times)


class Account:
    """What this process and its threads have used since the last look, by the same thread."""

    def __init__(self) -> None:
        self._threads, self._process = thread_times(), time.process_time()

    def take(self) -> tuple[float, Times]:
        """Processor seconds since the last look: of the process, and by label of its threads."""
        threads, process = thread_times(), time.process_time()
        used = {
            label: seconds - self._threads.get(label, 0.0) for label, seconds in threads.items()
        }
        whole = process - self._process
        self._threads, self._process = threads, process
        return whole, used
