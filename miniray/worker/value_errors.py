"""Exceptions that the code of a value raises while it is pickled or unpickled for a call.

``SystemExit`` of a task's own code ends its process, and ``KeyboardInterrupt`` or
``CancelledError`` counts as its cancel. Out of the ``__setstate__`` of an argument, or of a module
that a function needs, they mean neither: they are the call's error, as all others are. Those that
a signal's handler raised at that time keep their meaning.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from miniray.wire.interrupts import in_main_thread, signal_of

#: What executors do not take for the error of a call.
NOT_ERRORS = (SystemExit, KeyboardInterrupt, asyncio.CancelledError)


class ValueRaisedError(Exception):
    """Carries one of these, as its cause, to where a call is answered."""


def raise_as_error(error: BaseException) -> NoReturn:
    """Raise one of ``NOT_ERRORS`` again: carried, unless a signal's handler raised it."""
    if in_main_thread() and signal_of(type(error), error.__traceback__) is not None:
        raise error
    raise ValueRaisedError from error


def carried(error: BaseException) -> BaseException:
    """What an exception carries; others are themselves."""
    if type(error) is ValueRaisedError:  # `isinstance` runs code of the user's class
        return error.__cause__ or error
    return error
