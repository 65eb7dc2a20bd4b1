"""Ctrl-C in local mode, where the train loop is in the thread that signals interrupt.

On workers the first Ctrl-C reaches the driver, and cuts no upload off. Here an upload is made to
end first, if it runs in that thread. What runs in other threads goes on by itself.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

#: What the user reads when a run does not stop at once.
STOPPING = (
    "Stopping the run once the checkpoints that are being uploaded are complete. "
    "Press Ctrl-C again to stop at once."
)


class Interrupts:
    """What the user has asked for by Ctrl-C.

    Attributes:
        at_once: Whether nothing is to be waited for any more.
    """

    def __init__(self) -> None:
        self.at_once = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at the end of the block; at once where it comes twice.

        Only where it would be raised: elsewhere a program has its own way with the signal.
        """
        ours = threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        asked = False

        def handle(*_: Any) -> None:
            nonlocal asked
            if asked:
                self.at_once = True
                raise KeyboardInterrupt
            asked = True
            logger.warning(STOPPING)

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked:
            raise KeyboardInterrupt
