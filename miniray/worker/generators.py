"""Items of the generators of calls: a fixed number of results, or a stream, sent one by one.

Items of a stream are made no further ahead than the caller reads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

from miniray.exceptions import TaskCancelledError
from miniray.messages import protocol as p
from miniray.worker.replies import Stored, wrong_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from miniray.common.object_ref import ObjectRef
    from miniray.messages.value import Value
    from miniray.objects.waiting import Block
    from miniray.wire.peers import Peer
    from miniray.worker.replies import Results
    from miniray.worker.work import Work

logger = logging.getLogger(__name__)

_END = object()
#: Bytes that may wait in memory because a caller does not read, before its streams pause.
_UNREAD = 16 * 1024 * 1024


@dataclasses.dataclass(eq=False, repr=False)
class Generators:
    """Takes what generators yield. A stream waits while its caller does not read."""

    #: Makes values of items.
    results: Results
    #: Keeps a cancel out between a value and its message, and heeds it after.
    whole: Callable[[Work], AbstractContextManager[None]]
    #: By call of a caller: what was received and has not ended.
    unanswered: dict[tuple[bytes, int], Work]
    #: Waits for the running task; gives its CPU back meanwhile.
    block: Block

    # --- a fixed number of results -----------------------------------------------------
    def store(self, items: Iterator[Any], work: Work) -> Stored:
        """Make the values of a call with a fixed number of results that yields them.

        Each value is stored before the next one is made: they need not fit into the process
        together. If it fails or ends too early, that is the error of the results that it did
        not make, and what it yields or raises after the last one is logged, as in Ray. One that
        makes values once more and ends too early may have made others: it fails as a whole.

        Raises:
            Exception: What the generator raised before its first value, or any that was to be
                made once more.
        """
        values: list[Value] = []
        refs: list[ObjectRef[Any]] = []
        try:
            self._take_items(items, work, values, refs)
        except BaseException:
            self.results.free(values)
            raise
        finally:
            close_items(items)
        return Stored(values, self.results.pin(work.caller, refs) if refs else 0)

    def _take_items(
        self,
        items: Iterator[Any],
        work: Work,
        values: list[Value],
        refs: list[ObjectRef[Any]],
    ) -> None:
        count, name = len(work.return_ids), work.name
        try:
            for item in itertools.islice(items, count):
                with self.whole(work):
                    values.append(self.results.store(item, work, refs))
                del item  # before the next one is made
            if len(values) < count:
                raise wrong_number(name, count, len(values))
            if not work.again and next(items, _END) is not _END:
                logger.warning("%s has num_returns=%s and yielded more values", name, count)
        except Exception as error:
            if not values or work.again or isinstance(error, TaskCancelledError):
                raise
            if len(values) == count:
                logger.exception("%s raised after the last of its results", name)
            values += [self.results.error(error, name)] * (count - len(values))

    # --- a stream ----------------------------------------------------------------------
    def stream(self, work: Work, result: Any) -> None:
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
        with self.whole(work):
            value, pin = self.results.value(item, work)
            work.caller.send((p.PEER_STREAM, work.number, index, value, pin))

    def may_go_on(self, work: Work, sent: int) -> bool:
        """Return whether to make the next item; if not, ``consumed_changed`` is set later."""
        if work.consumed == -1:
            return True
        if work.stream is not None and 0 <= work.stream <= sent - work.consumed:
            return False
        caller = work.caller
        if caller.backlog() <= _UNREAD:
            return True
        caller.when_drained(functools.partial(self.look_again, caller))
        return False

    def _await_reader(self, work: Work, sent: int) -> None:
        """Wait until the caller has taken enough of the sent items (backpressure)."""
        while not self.may_go_on(work, sent):
            work.consumed_changed.clear()
            if self.may_go_on(work, sent):
                return
            self.block(work.consumed_changed.wait, None)

    def on_ack(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """Record how many items the caller took, or that it stopped reading (PEER_STREAM_ACK)."""
        _, number, consumed = message
        work = self.unanswered.get((peer.process_id, number))
        if work is not None:
            work.consumed = consumed
            changed = work.consumed_changed
            if changed is not None:
                changed.set()

    def caller_gone(self, caller: Peer) -> None:
        """Stop sending to a caller that has ended."""
        for work in list(self.unanswered.values()):
            if work.caller.process_id == caller.process_id:
                work.consumed = -1
        self.look_again(caller)

    def look_again(self, caller: Peer) -> None:
        """Let all streams to a caller check again whether they may go on."""
        for work in list(self.unanswered.values()):
            changed = work.consumed_changed
            if changed is not None and work.caller.process_id == caller.process_id:
                changed.set()


def items_of(result: Any, name: str) -> Iterator[Any]:
    """Return what a call that streams has returned, as an iterator; ``close_items`` follows.

    Raises:
        TypeError: It has no items.
    """
    if hasattr(result, "__next__"):
        return result  # type: ignore[no-any-return]
    if not hasattr(result, "__iter__"):
        raise TypeError(
            f'{name} has num_returns="streaming" but returned a '
            f"{type(result).__name__}, which cannot be iterated."
        )
    return iter(result)


def close_items(items: Iterator[Any]) -> None:
    """End an iterator: a generator runs its ``finally`` blocks, a file is closed."""
    close = getattr(items, "close", None)
    if close is not None:
        close()
