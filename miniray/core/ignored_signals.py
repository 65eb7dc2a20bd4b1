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

from miniray.core.mapped import unmap, unmap_again
from miniray.object_ref import ObjectRef, hooks
from miniray.object_ref_generator import ObjectRefGenerator

if TYPE_CHECKING:
    from types import TracebackType

    from miniray.core.io_loop import IOLoop

#: Seconds after which the signal comes: what it cut off is over then.
_PAUSE = 0.02
_OURS = (ObjectRef.__del__, ObjectRefGenerator.__del__, unmap)


class IgnoredSignals:
    """Sends signals of the main thread once more. Belongs to a process that is attached."""

    def __init__(self, loop: IOLoop) -> None:
        self._loop = loop
        self._others = sys.unraisablehook

    def install(self) -> None:
        """From now on; what is not ours goes on to the hook that there was."""
        self._others = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable

    def remove(self) -> None:
        """Not any more, unless somebody has put another hook before this one."""
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._others

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        finish(unraisable)
        number = _signal_of(unraisable) if unraisable.object in _OURS else None
        main_thread = threading.main_thread().ident
        if number is None or main_thread is None:
            self._others(unraisable)
        else:
            send = functools.partial(signal.pthread_kill, main_thread, number)
            self._loop.call_later(_PAUSE, send)


def finish(unraisable: sys.UnraisableHookArgs) -> None:
    """If the end of a ref, of a generator or of a mapping was cut off, do it once more."""
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
    """The variables of the function that was cut off."""
    return trace.tb_frame.f_locals if trace is not None else {}


def _not_counted(trace: TracebackType | None) -> ObjectRef[Any] | None:
    """The ref whose ``__del__`` was cut off before it was counted as dropped, if it counts."""
    known = _locals(trace)
    ref: ObjectRef[Any] | None = known.get("self")
    if "counted" in known or not getattr(ref, "_owner_node", ""):
        return None
    return ref


def _signal_of(unraisable: sys.UnraisableHookArgs) -> int | None:
    """The signal whose handler raised this; None if none did."""
    codes = set()
    trace: TracebackType | None = unraisable.exc_traceback
    while trace is not None:
        codes.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if handler is signal.default_int_handler:
            if unraisable.exc_type is KeyboardInterrupt:
                return number
        elif getattr(handler, "__code__", None) in codes:  # of a method: that of its function
            return number
    return None
