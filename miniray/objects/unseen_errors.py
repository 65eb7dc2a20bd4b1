"""Errors of tasks and methods that nobody has asked for: whose results they are tells them.

Which those are is known to the object table. Here it is decided which of them are worth a
message, and that a thousand failures of one kind are not a thousand messages.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.exceptions import (
    ActorDiedError,
    DeathCause,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)
from miniray.messages.value import load_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.messages.value import Value

logger = logging.getLogger(__name__)

#: Seconds for which an error that was told, or raised, stands for others of its kind.
WINDOW = 10.0
#: Errors that wait to be looked at; of further ones only the number is reported.
MOST_WAITING = 20

_Kind = tuple[str, type[BaseException]]


class UnseenErrors:
    """Tells errors that were dropped unread.

    Args:
        later: Runs a function in a thread in which user code may run: unpickling an error does.
        clock: As ``time.monotonic``.
    """

    def __init__(
        self,
        later: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._later = later
        self._clock = clock
        self._lock = threading.RLock()  # a collection in here may drop further ones
        self._known: dict[_Kind, float] = {}
        self._waiting = 0
        self._skipped = 0

    def raised(self, error: BaseException) -> None:
        """Note that user code gets an error: others of its kind need not be told for a while."""
        kind = _kind_of(error)
        if kind is not None:
            self._is_known(kind)

    def dropped(self, value: Value) -> None:
        """Tell an error that nobody has looked at."""
        if config().ignore_unhandled_errors:
            return
        with self._lock:
            if self._waiting >= MOST_WAITING:
                self._skipped += 1
                return
            self._waiting += 1
        self._later(lambda: self._tell(value))

    def _tell(self, value: Value) -> None:
        with self._lock:
            self._waiting -= 1
        error = load_error(value)
        kind = None if error is None else _kind_of(error)
        if kind is None or self._is_known(kind):
            return
        with self._lock:
            skipped, self._skipped = self._skipped, 0
        more = f" {skipped} others were not looked at." if skipped else ""
        logger.error(
            "Unhandled error: nobody asked for the result of %s, which failed.%s "
            "(MINIRAY_IGNORE_UNHANDLED_ERRORS=1 hides such messages.)\n%s",
            kind[0],
            more,
            error,
        )

    def _is_known(self, kind: _Kind) -> bool:
        """Note that such an error is told or raised; whether one was just before."""
        now = self._clock()
        with self._lock:
            known = self._known.get(kind)
            if known is None:
                self._known = {each: at for each, at in self._known.items() if now - at < WINDOW}
            self._known[kind] = now
        return known is not None and now - known < WINDOW


def _kind_of(error: BaseException) -> _Kind | None:
    """Return what failed and how; None for ends that somebody has asked for, as by ``cancel``."""
    if isinstance(error, TaskError):
        cancelled = isinstance(error.cause, TaskCancelledError)
        return None if cancelled else (error.function_name, type(error.cause))
    if isinstance(error, WorkerCrashedError):
        return error.function_name or "a task", type(error)
    if isinstance(error, ActorDiedError) and error.cause is DeathCause.CREATION_FAILED:
        return f"a call of {error.class_name or 'an actor'}", type(error)
    return None
