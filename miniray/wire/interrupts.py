"""Signals in the main thread, held back while the runtime is in the middle of something.

Python runs signal handlers in the main thread, between any two instructions, and many of them
raise: that of Ctrl-C, that which cancels a task, a time limit of the user's. Cut off there, a
message would be lost, or a call be sent that has no owner. So for the time of a *step* the main
thread's handlers are replaced by one that remembers the signal, and passes it on when the step is
over. A wait within a step may be cut off: the waiting code undoes what it began.
"""

from __future__ import annotations

import functools
import signal
import threading

# What is below the functions of `signal`, which make enums of everything: that takes longer
# than the call. Typeshed does not know the module.
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

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

#: Seconds that the main thread waits at a time. A signal that comes between the interpreter's last
#: look and the system call in which the thread waits, or that the kernel gives to another thread,
#: ends no wait: its handler runs after the next one.
LISTEN = 0.5

#: Signals whose handlers are looked up in each step; the others in each wait.
_SIGINT, _SIGALRM = int(signal.SIGINT), int(signal.SIGALRM)

#: Handlers, by signal, that need not be replaced: they call ``postpone``, or never raise.
_known: dict[int, Handler] = {}
#: The handlers of those two that were last found, and all that are to be replaced: they seldom
#: change, and every call begins a step.
_on_sigint: Any = None
_on_sigalrm: Any = None
_to_replace: tuple[tuple[int, Handler], ...] = ()
#: What holds back the signals of the main thread, if anything does; and what did before.
_active: Interrupts | None = None
_spare: Interrupts | None = None
_main_thread = threading.main_thread().ident
_get_ident = threading.get_ident


class Interrupts:
    """The handlers of the main thread for the time of a step, and of those within it.

    ``held`` says whether signals wait; it is True from ``begin`` on, and a thread that waits
    clears it for the moments in which it only waits. A handler that runs then may begin a step.
    """

    __slots__ = ("_around", "_handlers", "_mine", "_pending", "held")

    def __init__(self) -> None:
        self._handlers: tuple[tuple[int, Handler], ...] = ()
        self._mine = self._on_signal
        #: Calls of handlers. No variable may hold their frames: one of them may be its own.
        self._pending: list[Callable[[], Any]] = []
        #: For each step but the outermost: whether signals were held when it began.
        self._around: list[bool] = []
        self.held = True

    @staticmethod
    def begin(look: bool = False) -> Interrupts | None:
        """Begin a step; None if the calling thread is not the one that runs handlers.

        Args:
            look: Whether to find out which handlers there are by now. If not, those of signals
                that programs seldom handle may be out of date, which is quicker.
        """
        # Each call of a remote function or method passes here: little is looked up.
        global _active, _spare
        if _get_ident() != _main_thread:
            return None
        outer = _active
        if outer is not None:
            held = outer.held
            outer.held = True  # from here on, every step is completed
            outer._around.append(held)
            return outer
        step = _spare
        if step is None:
            step = Interrupts()
        else:
            _spare = None
        try:
            _active = step
            if (
                look
                or _getsignal(_SIGINT) is not _on_sigint
                or _getsignal(_SIGALRM) is not _on_sigalrm
            ):
                _look()
            step._handlers = _to_replace
            for number, _ in _to_replace:
                _set_handler(number, step._mine)
        except ValueError:  # Python is embedded, and signals belong to another thread
            _active = None
            return None
        except BaseException:  # of a handler that was not yet replaced
            step.end()
            raise
        return step

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        handler = dict(self._handlers)[number]
        if self.held:
            self._pending.append(functools.partial(handler, number, frame))
        else:
            handler(number, frame)

    def release(self) -> None:
        """Let signals through: run the handlers of waiting signals, which may raise."""
        self.held = False
        if self._pending:
            try:
                self._pending.pop(0)()
            finally:
                self.release()  # what one raises does not keep the others from it

    def end(self) -> None:
        """End the step: put the handlers back, and run the handlers of signals that wait."""
        global _active, _spare
        self.held = True
        if self._around:
            if not self._around.pop():
                self.release()
            return
        if _active is self:
            _active = None
        try:
            for number, handler in self._handlers:
                replaced = _set_handler(number, handler)
                if replaced is not self._mine and replaced is not handler:
                    _set_handler(number, replaced)  # the step, or a handler, has set another
        except BaseException:  # of one that is back already; the others must follow
            self.end()
            raise
        if self._pending:
            self.release()
        else:
            _spare = self


def _look() -> None:
    """Find out which handlers there are now, and which of them are replaced in steps."""
    global _on_sigint, _on_sigalrm, _to_replace
    found = {number: _getsignal(number) for number in _SIGNALS}
    _on_sigint, _on_sigalrm = found[_SIGINT], found[_SIGALRM]
    _to_replace = tuple(
        (number, handler)
        for number, handler in found.items()
        if callable(handler) and handler is not _known.get(number)
    )


def in_main_thread() -> bool:
    """Return whether the calling thread is the one that runs handlers of signals."""
    return threading.get_ident() == _main_thread


def handler_of(number: int) -> Any:
    """Return the handler of a signal; in a step, the one that is put back after it."""
    active = _active
    handlers = dict(active._handlers) if active is not None else {}
    return handlers.get(number) or _getsignal(number)


def signal_of(kind: type[BaseException], trace: TracebackType | None) -> int | None:
    """Return the signal whose handler raised an exception; None if none did.

    Args:
        kind: Its class.
        trace: Its traceback.
    """
    codes = set()
    while trace is not None:
        codes.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    for number in signal.valid_signals():
        handler = handler_of(number)
        if handler is signal.default_int_handler:
            if kind is KeyboardInterrupt:
                return number
        elif getattr(handler, "__code__", None) in codes:  # of a method: that of its function
            return number
    return None


def held_here() -> Interrupts | None:
    """Return what holds back the signals of the calling thread, if it is in a step."""
    return _active if threading.get_ident() == _main_thread else None


def postpone(handler: Handler, number: int, frame: FrameType | None) -> bool:
    """Return whether a signal waits; its handler, which is not replaced, is called again then."""
    active = _active
    if active is None or not active.held:
        return False
    active._pending.append(functools.partial(handler, number, frame))
    return True


def leave_in_place(number: int, handler: Handler) -> None:
    """Do not replace a handler in steps: it calls ``postpone``, or never raises."""
    global _on_sigint
    _known[int(number)] = handler
    _on_sigint = None  # the next step looks


def forked() -> None:
    """Forget the steps of the parent's main thread, in a forked child."""
    global _main_thread
    _main_thread = threading.get_ident()  # the thread that forked is the only one
    active = _active
    if active is not None:
        active._around.clear()
        active._pending.clear()
        active.end()


def uncut(step: F) -> F:
    """Decorate a function that no signal interrupts, unless it waits."""

    @functools.wraps(step)
    def whole(*args: Any, **kwargs: Any) -> Any:
        interrupts = Interrupts.begin()
        try:
            return step(*args, **kwargs)
        finally:
            if interrupts is not None:
                interrupts.end()

    return whole  # type: ignore[return-value]
