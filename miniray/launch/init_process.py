"""The first process of a container: passes signals on, and reaps what others leave to it."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from miniray.launch.events import ENDING, PASSED_ON

if TYPE_CHECKING:
    from collections.abc import Callable

_INIT = 1


def run_below_init(work: Callable[[], int]) -> int:
    """Return what ``work`` does; in a child process, if this one is the first of a container.

    Nothing but the first process can reap the orphans of a container, and ``work`` waits for
    children of its own.
    """
    if os.getpid() != _INIT:
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
