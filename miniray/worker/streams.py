"""Sends what the generator of a call yields, as far as the caller reads on."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from miniray.messages import protocol as p
from miniray.worker.items import close_items, items_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.wire.peers import Peer
    from miniray.worker.interruption import Interruption
    from miniray.worker.results import Results
    from miniray.worker.work import Work

#: Bytes that may wait in memory because a caller does not read, before its streams pause.
_UNREAD = 16 * 1024 * 1024


class Streams:
    """The sending end of streams.

    Args:
        results: Makes values of items.
        interruption: Of the main thread, which may be the one that sends.
        block: Waits as user code does that waits.
        wake: Lets all streams to a caller look again whether they may go on.
    """

    def __init__(
        self,
        results: Results,
        interruption: Interruption,
        block: Callable[[Callable[[float | None], bool], float | None], bool],
        wake: Callable[[Peer], None],
    ) -> None:
        self._results = results
        self._interruption = interruption
        self._block = block
        self._wake = wake

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

    def may_go_on(self, work: Work, sent: int) -> bool:
        """Whether the next item may be made; if not, ``consumed_changed`` is set when it may be."""
        if work.consumed == -1:
            return True
        if work.stream is not None and 0 <= work.stream <= sent - work.consumed:
            return False
        caller = work.caller
        if caller.backlog() <= _UNREAD:
            return True
        caller.when_drained(functools.partial(self._wake, caller))
        return False

    def _await_reader(self, work: Work, sent: int) -> None:
        """Backpressure: wait until the caller has taken enough of what was sent."""
        while not self.may_go_on(work, sent):
            work.consumed_changed.clear()
            if self.may_go_on(work, sent):
                return
            self._block(work.consumed_changed.wait, None)
