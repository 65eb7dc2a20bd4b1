"""How a process of user code ends: an actor by ``exit_actor``, a child that a worker forked."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from miniray.worker import stdio


class ActorExit(BaseException):
    """Raised in a method to end its actor; not an Exception, so that user code lets it pass."""


def end_child(why: BaseException | None) -> NoReturn:
    """End a forked child as an interpreter would, but for exit functions, which are its parent's.

    Args:
        why: What came out of the function in which it was forked; None: it returned.
    """
    code: object = 0
    if isinstance(why, SystemExit):
        code = why.code or 0
    elif why is not None and not isinstance(why, ActorExit):
        traceback.print_exception(why)
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201 - as the interpreter does with sys.exit("text")
        code = 1
    stdio.flush_all()
    os._exit(code & 0xFF)
