"""Signals in the main thread, held back while the runtime is in the middle of something.

Python runs signal handlers in the main thread, between any two instructions, and many of them
raise: that of Ctrl-C, that which cancels a task, a time limit of the user's. Cut off there, a
message would be lost, or a call sent of which nobody knows. So for the time of a *step* the main
thread's handlers are replaced by one that remembers the signal, and passes it on when the step is
over. A wait within a step may be cut off: who waits there knows what to undo.
"""

from __future__ import annotations

# What is below the functions of `signal`, which make enums of everything: that takes longer
# than the call. Typeshed does not know the module.
import _signal  # type: ignore[import-not-found]
import functools
import signal
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], Any]

F = TypeVar("F", bound="Callable[..., Any]")

#: Signals for which programs have handlers that raise. SIGUSR1 also cancels tasks.
_SIGNALS = tuple(
    int(number)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGALRM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGVTALRM,
    )
)

#: Handlers, by signal, that need not be replaced: they ask ``postpone``, or never raise.
_known: dict[int, Handler] = {}
#: What holds back the signals of the main thread, if anything does.
_active: Interrupts | None = None


class Interrupts:
    """The handlers of the main thread for the time of a step, and of those within it.

    ``held`` says whether signals wait; it is True from ``begin`` on, and a thread that waits
    clears it for the moments in which it only waits. A handler that runs then may begin a step.
    """

    __slots__ = ("_around", "_handlers", "_pending", "held")

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        #: Calls of handlers. No variable may hold their frames: one of them may be its own.
        self._pending: list[Callable[[], Any]] = []
        #: For each step but the outermost: whether signals were held when it began.
        self._around: list[bool] = []
        self.held = True

    @classmethod
    def begin(cls) -> Interrupts | None:
        """Begin a step; None if the calling thread is not the one that runs handlers."""
        global _active
        if threading.get_ident() != threading.main_thread().ident:
            return None
        outer = _active
        if outer is not None:
            held = outer.held
            outer.held = True  # from here on nothing is cut off
            outer._around.append(held)
            return outer
        self = cls()
        try:
            _active = self
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not _known.get(number):
                    self._handlers[number] = handler
                    _signal.signal(number, self._on_signal)
        except ValueError:  # Python is embedded, and signals belong to another thread
            _active = None
            return None
        except BaseException:  # of a handler that was not yet replaced
            self.end()
            raise
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        if self.held:
            self._pending.append(functools.partial(handler, number, frame))
        else:
            handler(number, frame)

    def release(self) -> None:
        """Signals need not wait any longer: run the handlers of those that do. These may raise."""
        self.held = False
        if self._pending:
            try:
                self._pending.pop(0)()
            finally:
                self.release()  # what one raises does not keep the others from it

    def end(self) -> None:
        """The step is over: put the handlers back, and run those of signals that wait."""
        global _active
        self.held = True
        if self._around:
            if not self._around.pop():
                self.release()
            return
        if _active is self:
            _active = None
        mine = self._on_signal
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == mine:  # else a handler has set another meanwhile
                    _signal.signal(number, handler)
        except BaseException:  # of one that is back already; the others must follow
            self.end()
            raise
        self.release()


def held_here() -> Interrupts | None:
    """What holds back the signals of the calling thread, if it is in a step."""
    active = _active
    if active is None or threading.get_ident() != threading.main_thread().ident:
        return None
    return active


def postpone(handler: Handler, number: int, frame: FrameType | None) -> bool:
    """For a handler that is not replaced: whether its signal waits; it is called again then."""
    active = _active
    if active is None or not active.held:
        return False
    active._pending.append(functools.partial(handler, number, frame))
    return True


def leave_in_place(number: int, handler: Handler) -> None:
    """A handler is not replaced for the time of a step: it asks ``postpone``, or never raises."""
    _known[int(number)] = handler


def forked() -> None:
    """In a forked child: the steps of the parent's main thread are not this process's."""
    active = _active
    if active is not None:
        active._around.clear()
        active._pending.clear()
        active.end()


def uncut(step: F) -> F:
    """Decorate a function that no signal cuts off, unless it waits."""

    @functools.wraps(step)
    def whole(*args: Any, **kwargs: Any) -> Any:
        interrupts = Interrupts.begin()
        try:
            return step(*args, **kwargs)
        finally:
            if interrupts is not None:
                interrupts.end()

    return whole  # type: ignore[return-value]
