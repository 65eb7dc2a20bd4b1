"""Refs that come and go in this process, and what that means for the objects.

Dropping a ref only queues its id; here the queue is counted, by whatever thread
comes by and at the latest by the I/O thread. Pickled and unpickled refs are seen here too.
"""

from __future__ import annotations

import collections
import contextlib
import gc
from typing import TYPE_CHECKING, Any

from miniray.client.runtime_parts import RuntimeParts
from miniray.common.object_ref import ObjectRef, hooks
from miniray.messages import protocol as p
from miniray.wire.interrupts import uncut

if TYPE_CHECKING:
    import threading

#: Seconds after which dropped refs are looked at again, while some go.
_DRAIN_AGAIN = 0.02
#: Seconds that ``settle`` waits for a thread that counts refs; it may run user's finalizers.
_SETTLE = 1.0


class RefTracking(RuntimeParts):
    """Counts refs; what the object table tells others goes through here."""

    #: The last look of the I/O thread found nothing dropped.
    _quiet: bool
    #: This process has left the cluster.
    _closed: bool
    #: Held by the thread that counts dropped refs.
    _draining: threading.RLock

    def _install_hooks(self) -> None:
        hooks.dropped = collections.deque()
        hooks.woken = False
        hooks.wake = self._wake_for_drops
        hooks.serialized = self._on_serialized
        hooks.deserialized = self._on_deserialized

    # --- refs that come and go ---------------------------------------------------------
    def _wake_for_drops(self) -> None:
        self.loop.call_soon(self._drain_in_loop)

    def _drain_in_loop(self) -> None:
        """The loop's drain: stays on call while refs keep going, so that few drops wake it."""
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
        self.loop.call_later(_DRAIN_AGAIN, self._drain_in_loop)

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
                    self.shared_memory.report_unmapped()
            finally:
                self._draining.release()

    def settle(self) -> None:
        """Count all refs that were dropped until now, by whatever thread."""
        held = self._draining.acquire(timeout=_SETTLE)
        try:
            self.drain()
        finally:
            if held:
                self._draining.release()

    def make_room(self) -> None:
        """Let go of all that this process needs no more, values in garbage included."""
        gc.collect()
        self.settle()

    def _on_serialized(self, ref: ObjectRef[Any]) -> None:
        from miniray.values.serialization import collector

        if collector.refs is not None:
            collector.refs.append(ref)
        else:
            # Pickled by the user, outside of the runtime: nobody can know when that
            # copy goes, so the object stays for the life of this process (as in Ray).
            self.table.pin(ref.binary())

    def _on_deserialized(self, id: bytes, owner_node: bytes) -> ObjectRef[Any]:
        if not owner_node:
            return ObjectRef(id, b"")
        with self.table.lock:  # else another thread may drop the last ref in between
            if self.table.entry(id) is not None:
                return self.table.adopt(id, owner_node)[0]
        # Not from a value or a call that holds it: from a closure, or the user's bytes.
        return self.borrowing.hold(((id, owner_node),))[0]

    # --- core.objects.Outside ------------------------------------------------------------
    def free_shared(self, value: Any) -> None:
        """The owner frees a value."""
        if value[0] == p.VALUE_SHARED:
            self.shared_memory.free(value)

    def unborrow(self, id: bytes, owner_node: bytes) -> None:
        """The last ref of a borrowed object went away."""
        self.borrowing.unborrow(id, owner_node)
        self.actors.released(id)

    def origin_unused(self, id: bytes) -> None:
        """An object whose making is remembered went away."""
        self.calls.lineage.forget(id)
        self.calls.free_unneeded()

    def error_unseen(self, value: Any) -> None:
        """An object went away whose value is an error that nobody has seen."""
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # this process ends, and starts no threads
                self.unseen_errors.dropped(value)

    def actor_unreferenced(self, id: bytes) -> None:
        """The last handle of an actor of this process went away."""
        self.actors.unreferenced(id)
