"""How a process of user code ends: an actor by ``exit_actor``, a child that a worker forked.

Also all that a worker has started, if its daemon is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import NoReturn

from miniray.common.process_state import children_of
from miniray.messages.actor_death import ActorExit
from miniray.worker import stdio


def exit_code(why: SystemExit) -> int:
    """The exit code that it asks for; what is no number is written to stderr, as Python does.

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
