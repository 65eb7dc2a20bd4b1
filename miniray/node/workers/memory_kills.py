"""Tells a process that the kernel killed for lack of memory from others that were killed.

The kernel tells nobody which process it killed. It counts these kills for the whole machine, so
a process that SIGKILL ended right after the count rose was most likely the one.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from miniray.system.machine import memory_limit

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds after such a kill in which the end of a process counts as it: the kernel takes long to
#: free many gigabytes, and the count is looked at with each heartbeat only.
_RECENT = 15.0

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryKills:
    """Watches the kernel's count of kills for lack of memory.

    Args:
        root: What ``/proc`` and ``/sys`` are below.
        clock: Gives seconds.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._count = self._read()
        self._last: float | None = None

    def look(self) -> None:
        """Read the count; to be called regularly, so that older kills are not taken for new."""
        count = self._read()
        if count > self._count:
            self._last = self._clock()
        self._count = count

    def explain(self, code: int | None) -> str:
        """A sentence on the end of a process, if it was most likely such a kill; else empty.

        Args:
            code: How it ended; a negative code is a signal's number.
        """
        if code != -signal.SIGKILL:
            return ""
        self.look()
        if self._last is None or self._clock() - self._last > _RECENT:
            return ""
        return (
            f"At that time the kernel killed a process of this machine because memory ran out, "
            f"most likely this one. The machine, or the container, has "
            f"{memory_limit(self._root) / 2**30:.1f} GiB."
        )

    def _read(self) -> int:
        """How many processes the kernel has killed for lack of memory; 0 where it does not say."""
        try:
            found = _COUNT.search((self._root / "proc/vmstat").read_text())
        except OSError:
            return 0
        return int(found[1]) if found is not None else 0
