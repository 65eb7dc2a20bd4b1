"""Refs that come and go in this process, and what that means for the objects.

Dropping a ref only queues its id; here the queue is counted, by the next thread that calls in, at
the latest by the I/O thread. Pickled and unpickled refs are seen here too.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import TYPE_CHECKING, Any

from miniray.common.object_ref import ObjectRef, hooks
from miniray.values.serialization import collector
from miniray.wire.interrupts import uncut

if TYPE_CHECKING:
    from miniray.objects.borrowing import Borrowing
    from miniray.objects.objects import ObjectTable
    from miniray.objects.shared_memory import SharedMemory
    from miniray.wire.io_loop import IOLoop

#: Seconds after which dropped refs are looked at again, while some go.
_DRAIN_AGAIN = 0.02
#: Seconds that ``settle`` waits for a thread that counts refs; it may run user's finalizers.
_SETTLE = 1.0


@dataclasses.dataclass(eq=False, repr=False)
class RefTracking:
    """Counts the refs of this process."""

    _loop: IOLoop
    #: The objects of this process.
    table: ObjectTable
    _shared_memory: SharedMemory
    _borrowing: Borrowing

    def __post_init__(self) -> None:
        #: The last look of the I/O thread found no dropped refs.
        self._quiet = False
        #: Held by the thread that counts dropped refs.
        self._draining = threading.RLock()

    def begin(self) -> None:
        hooks.begin(self._wake, self._on_serialized, self._on_deserialized)

    def _wake(self) -> None:
        self._loop.call_soon(self._drain_in_loop)

    def _drain_in_loop(self) -> None:
        """Drain in the loop, and look again while refs keep going, so that few drops wake it."""
        if hooks.dropped:
            self.drain()
        elif self._quiet:
            self._quiet = False
            hooks.woken = False
            if not hooks.dropped:  # else one went away before the flag was down
                return
            hooks.woken = True
        else:
            self._quiet = True
        self._loop.call_later(_DRAIN_AGAIN, self._drain_in_loop)

    @uncut
    def drain(self) -> None:
        """Count the refs that were dropped since the last time.

        One thread does that at a time, and also what others find to do meanwhile.
        """
        self._quiet = False
        dropped = hooks.dropped
        while dropped and self._draining.acquire(blocking=False):
            try:
                batch = []
                try:
                    while True:
                        batch.append(dropped.popleft())
                except IndexError:
                    pass
                if batch:
                    self.table.drop(batch)
                    if self._shared_memory.unmapped:
                        self._shared_memory.report_unmapped()
            finally:
                self._draining.release()

    def settle(self) -> None:
        """Count all refs that any thread has dropped until now."""
        held = self._draining.acquire(timeout=_SETTLE)
        try:
            self.drain()
        finally:
            if held:
                self._draining.release()

    def release_unused(self) -> None:
        """Release all objects that this process no longer uses, values in garbage included."""
        gc.collect()
        self.settle()

    def _on_serialized(self, ref: ObjectRef[Any]) -> None:
        if collector.refs is not None:
            collector.refs.append(ref)
        else:
            # Pickled by the user, outside of the runtime: the end of that copy cannot be observed,
            # so the object stays for the life of this process (as in Ray).
            self.table.pin(ref.binary())

    def _on_deserialized(self, id: bytes, owner_node: bytes) -> ObjectRef[Any]:
        if not owner_node:
            return ObjectRef(id, b"")
        with self.table.lock:  # else another thread may drop the last ref in between
            if self.table.entry(id) is not None:
                ref, _ = self.table.adopt(id, owner_node)
                return ref
        # Not from a value or a call that holds it: from a closure, or the user's bytes.
        [ref] = self._borrowing.hold(((id, owner_node),))
        return ref
