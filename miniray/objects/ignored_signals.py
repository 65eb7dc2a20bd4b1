"""Signals whose handlers raised when something of miniray went away: they come again.

Python runs handlers between any two instructions of the main thread, and ignores what is raised
in a ``__del__`` or in the callback of a weak reference. Refs are dropped and memory is unmapped all
the time, so Ctrl-C would have no effect now and then.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from miniray.common.object_ref import ObjectRef, hooks
from miniray.objects.object_ref_generator import ObjectRefGenerator
from miniray.values.mapped import unmap, unmap_again
from miniray.wire.interrupts import signal_of

if TYPE_CHECKING:
    from types import TracebackType

    from miniray.wire.io_loop import IOLoop

#: Seconds after which the signal comes again: what it interrupted is over then.
_PAUSE = 0.02
_OURS = (ObjectRef.__del__, ObjectRefGenerator.__del__, unmap)


class IgnoredSignals:
    """Sends signals of the main thread once more. Belongs to a process that is attached."""

    def __init__(self, loop: IOLoop) -> None:
        self._loop = loop
        self._others = sys.unraisablehook
        #: The main thread is in the hook: Python ignores what is raised there, too.
        self._in_hook = False

    def install(self) -> None:
        """Replace the hook for ignored exceptions; the old one gets all that are not ours."""
        self._others = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable

    def remove(self) -> None:
        """Put the hook back, unless somebody has put another one before this."""
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._others

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        number = None
        if unraisable.object in _OURS:
            number = signal_of(unraisable.exc_type, unraisable.exc_traceback)
        finish(unraisable)
        if number is None:
            self._others(unraisable)
            return
        self._in_hook = True
        try:
            self._send_later(number)
        finally:
            self._in_hook = False

    def _send_later(self, number: int) -> None:
        self._loop.call_later(_PAUSE, functools.partial(self._send, number))

    def _send(self, number: int) -> None:
        main_thread = threading.main_thread().ident
        if self._in_hook:  # it takes long: the machine is busy
            self._send_later(number)
        elif main_thread is not None:
            signal.pthread_kill(main_thread, number)


def finish(unraisable: sys.UnraisableHookArgs) -> None:
    """End a ref, a generator or a mapping once more, if a signal cut that off."""
    if unraisable.object is ObjectRef.__del__:
        ref = _not_counted(unraisable.exc_traceback)
        if ref is not None:
            hooks.dropped.append(ref.binary())
        hooks.woken = False
        hooks.call()
    elif unraisable.object is ObjectRefGenerator.__del__:
        generator: Any = _locals(unraisable.exc_traceback).get("self")
        if hasattr(generator, "_state") and hooks.wake is not None:
            generator.close()
    elif unraisable.object is unmap:
        unmap_again()


def _locals(trace: TracebackType | None) -> dict[str, Any]:
    return trace.tb_frame.f_locals if trace is not None else {}


def _not_counted(trace: TracebackType | None) -> ObjectRef[Any] | None:
    """Return the ref whose ``__del__`` was cut off before it was counted, if it counts."""
    known = _locals(trace)
    ref: ObjectRef[Any] | None = known.get("self")
    if "counted" in known or not getattr(ref, "_owner_node", ""):
        return None
    return ref
