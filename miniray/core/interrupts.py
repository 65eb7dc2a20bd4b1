"""Signals in the main thread, held back while it handles messages.

A waiting thread handles messages itself (``io_loop.py``). Python runs signal handlers in the
main thread, between any two instructions, and many of them raise: Ctrl-C would break off in the
middle of a message and lose it. So for the time of a wait the main thread's handlers are replaced
by one that remembers the signal while a message is handled, and passes it on after.
"""

from __future__ import annotations

# What is below the functions of `signal`, which make enums of everything: that takes longer
# than the call. Typeshed does not know the module.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

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


class Interrupts:
    """The handlers of the main thread for the time of one wait.

    ``held`` says whether signals wait; it is True from ``begin`` on, and the waiting thread
    clears it for the moments in which it only waits. Waits may be nested: a handler may wait.
    """

    __slots__ = ("_handlers", "_pending", "held")

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: list[tuple[int, FrameType | None]] = []
        self.held = True

    @classmethod
    def begin(cls) -> Interrupts | None:
        """Replace the handlers; None if the calling thread is not the one that has them."""
        if threading.get_ident() != threading.main_thread().ident:
            return None
        self = cls()
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._on_signal)
        except ValueError:  # Python is embedded, and signals belong to another thread
            return None
        except BaseException:  # of a handler that was not yet replaced
            self.end()
            raise
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.held:
            self._pending.append((number, frame))
        else:
            self._handlers[number](number, frame)

    def release(self) -> None:
        """Signals need not wait any longer: run the handlers of those that do. These may raise."""
        self.held = False
        while self._pending:
            number, frame = self._pending.pop(0)
            self._handlers[number](number, frame)

    def end(self) -> None:
        """Put the handlers back; then as ``release``."""
        self.held = True
        mine = self._on_signal
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == mine:  # else a handler has set another meanwhile
                    _signal.signal(number, handler)
        except BaseException:  # of one that is back already; the others must follow
            self.end()
            raise
        self.release()
