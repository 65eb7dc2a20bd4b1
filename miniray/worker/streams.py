"""Sends what the generator of a call yields, as far as the caller reads on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from miniray.core import protocol as p
from miniray.worker.items import close_items, items_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.worker.interruption import Interruption
    from miniray.worker.results import Results
    from miniray.worker.work import Work


class Streams:
    """The sending end of streams.

    Args:
        results: Makes values of items.
        interruption: Of the main thread, which may be the one that sends.
        block: Waits as user code does that waits.
    """

    def __init__(
        self,
        results: Results,
        interruption: Interruption,
        block: Callable[[Callable[[float | None], bool], float | None], bool],
    ) -> None:
        self._results = results
        self._interruption = interruption
        self._block = block

    def run(self, work: Work, result: Any) -> None:
        """Send what a call has returned, item by item."""
        items = items_of(result, work.name)
        work.consumed_changed = threading.Event()
        index = 0
        try:
            for item in items:
                if work.consumed == -1:
                    return
                self.send(work, index, item)
                del item  # before the next one is made
                index += 1
                self._await_reader(work, index)
        finally:
            close_items(items)

    def send(self, work: Work, index: int, item: Any) -> None:
        """Send one item, unless it cannot be pickled."""
        with self._interruption.put_off(work):
            value, pin = self._results.value(item, work.caller, work.name)
            work.caller.send((p.PEER_STREAM, work.number, index, value, pin))

    def _await_reader(self, work: Work, sent: int) -> None:
        """Backpressure: wait until fewer items than the limit are unread."""
        limit = work.stream
        if limit is None or limit < 0:
            return
        while work.consumed != -1 and sent - work.consumed >= limit:
            work.consumed_changed.clear()
            if work.consumed == -1 or sent - work.consumed < limit:
                return
            self._block(work.consumed_changed.wait, None)
