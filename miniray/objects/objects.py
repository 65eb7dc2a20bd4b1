"""The objects that this process knows: their values, waiters, local refs and borrowers.

Pure bookkeeping: what other processes must receive comes out as calls of ``Outside``.
The rules: the process that created an object owns it. It keeps
the value while a ref lives in this process, a call in flight uses it, a value that
lives contains it, or another process has borrowed it. A borrower notifies the owner
when its last ref goes.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol

from miniray.common.object_ref import ObjectIds, ObjectRef
from miniray.messages.value import is_error, is_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.common.names import CallSite
    from miniray.messages.value import Value

logger = logging.getLogger(__name__)


class ValueFetch:
    """A value that is being brought to this node for as long as a ref lives in this process."""

    __slots__ = ("_withdraw", "done", "number", "value", "waiters")

    def __init__(
        self, value: Value, number: int, withdraw: Callable[[list[int]], None], *, done: bool
    ) -> None:
        self.value = value
        #: Names the request, so that it can be withdrawn.
        self.number = number
        self._withdraw = withdraw
        #: The value is here, or the fetch has failed: `get` will raise the error.
        self.done = done
        self.waiters: list[Callable[[Entry], None]] = []

    def cancel(self) -> None:
        """Stop the fetch: the last ref is gone."""
        if not self.done:
            self.done = True
            self.waiters = []
            self._withdraw([self.number])


class Entry:
    """One object that this process owns or has borrowed. The table's lock protects it."""

    __slots__ = (
        "borrowers",
        "contained",
        "copies",
        "fetch",
        "id",
        "kept",
        "local",
        "made",
        "owner_node",
        "registered",
        "seen",
        "value",
        "waiters",
        "wanted",
    )

    #: Where it was put, or what made it; not there where that is not recorded: one more store
    #: for every entry would show in the time of a put.
    made: CallSite
    #: Owner's side: the value was requested, or sent to a reader; not there otherwise. It
    #: matters for errors only.
    seen: bool
    #: Other nodes to which calls of this process have brought the value; not there otherwise.
    copies: frozenset[bytes]

    def __init__(self, id: bytes, owner_node: bytes) -> None:
        self.id = id
        self.owner_node = owner_node
        #: Refs that live in this process, pins of calls in flight included.
        self.local = 0
        #: None until the object exists (or has failed).
        self.value: Value | None = None
        #: Refs that the value contains; this process keeps them alive with it.
        self.contained: list[ObjectRef[Any]] | None = None
        #: Callbacks for when the value is there.
        self.waiters: list[Callable[[Entry], None]] | None = None
        #: Owner's side: how often each process has borrowed it. A count may be negative
        #: for a moment, when a release overtakes the borrow that a third process reports.
        self.borrowers: dict[bytes, int] | None = None
        #: Borrower's side: registered with the owner, or the registration is on its way.
        self.registered = False
        #: Borrower's side: the value was requested from the owner.
        self.wanted = False
        #: Owner's side: what made the value is remembered (``lineage.py``).
        self.kept = False
        #: Its fetch to this node, if the value is on another and `wait` has requested it.
        self.fetch: ValueFetch | None = None


class Outside(Protocol):
    """Interface of the table to the rest of the process. Called without the table's lock."""

    def free_shared(self, value: Value) -> None:
        """Free a value of this owner in shared memory."""

    def unborrow(self, id: bytes, owner_node: bytes) -> None:
        """Notify the owner that the last ref of a borrowed object is gone."""

    def actor_unreferenced(self, id: bytes) -> None:
        """Notify the head that the last handle of an actor that this process created is gone."""

    def origin_unused(self, id: bytes) -> None:
        """Forget how an object was made, as the object is gone."""

    def error_unseen(self, value: Value) -> None:
        """Report the error that was the value of an object which is gone and was never read."""


class ObjectTable:
    """All entries of this process. Thread-safe; one short lock."""

    def __init__(self, process_id: bytes, node_id: bytes, outside: Outside) -> None:
        self.process_id = process_id
        self.node_id = node_id
        #: Makes the id of a further object, actor or placement group of this process.
        self.new_id = ObjectIds(process_id).new
        self._outside = outside
        self._entries: dict[bytes, Entry] = {}
        # Reentrant: a garbage collection may run user code, which may use refs, in any section.
        self.lock = threading.RLock()
        #: Ids that name actors created here: their entries never get a value.
        self._actors: set[bytes] = set()
        self._watchers: list[Callable[[Entry], None]] = []
        #: Refs that the user pickled, or that code captured: they count for ever.
        self.pickled: dict[bytes, int] = {}
        #: What each borrower holds, so that its death costs no walk over all objects.
        self._held_by: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    # --- making and finding ----------------------------------------------------------
    def create(self, id: bytes) -> ObjectRef[Any]:
        """Make an object of this process, whose value will come."""
        ref: ObjectRef[Any] = ObjectRef(
            id, self.node_id
        )  # a signal's exception here drops the entry
        entry = Entry(id, self.node_id)
        entry.local = 1
        self._entries[id] = entry
        return ref

    def create_with_value(
        self, id: bytes, value: Value, contained: list[ObjectRef[Any]] | None
    ) -> ObjectRef[Any]:
        ref: ObjectRef[Any] = ObjectRef(
            id, self.node_id
        )  # a signal's exception here drops the entry
        entry = Entry(id, self.node_id)
        entry.local = 1
        entry.value = value
        entry.contained = contained
        self._entries[id] = entry
        return ref

    def record(self, ref: ObjectRef[Any], made: CallSite) -> ObjectRef[Any]:
        """Remember where an object of this process was made; return its ref."""
        entry = self._entries.get(ref.binary())
        if entry is not None:
            entry.made = made
        return ref

    def create_actor(self, id: bytes) -> ObjectRef[Any]:
        """Make the ref that counts the handles of a new actor."""
        self._actors.add(id)
        return self.create(id)

    def is_actor(self, id: bytes) -> bool:
        """Return whether the id names an actor of this process, whose entry never has a value."""
        return id in self._actors

    def entry(self, id: bytes) -> Entry | None:
        return self._entries.get(id)

    def is_owned(self, id: bytes) -> bool:
        return id.startswith(self.process_id)

    def adopt(self, id: bytes, owner_node: bytes) -> tuple[ObjectRef[Any], Entry]:
        """Make a further ref of an object, known or not: the result of unpickling one."""
        with self.lock:
            entry = self._entries.get(id)
            if entry is None:
                entry = self._entries.setdefault(id, Entry(id, owner_node))
            entry.local += 1
        return ObjectRef(id, owner_node), entry

    def counted(self, id: bytes) -> ObjectRef[Any] | None:
        """Make a further ref of an object that this process knows; None if it does not."""
        with self.lock:
            entry = self._entries.get(id)
            if entry is None:
                return None
            entry.local += 1
        return ObjectRef(id, entry.owner_node)

    def snapshot(self) -> list[Entry]:
        with self.lock:
            return list(self._entries.values())

    # --- values ------------------------------------------------------------------
    def set_value(
        self,
        id: bytes,
        value: Value,
        contained: list[ObjectRef[Any]] | None = None,
        made: CallSite | None = None,
    ) -> bool:
        """Give an object its value and call its waiters; False if it has no holder any more.

        A second value for the same object is ignored (a retried task may answer twice).
        """
        with self.lock:
            entry = self._entries.get(id)
            if entry is not None:
                if entry.value is not None:
                    return value is entry.value
                entry.value = value
                entry.contained = contained
                if made is not None:
                    entry.made = made
                waiters = entry.waiters
                entry.waiters = None
                if self._watchers:
                    waiters = [*(waiters or ()), *self._watchers]
        if entry is None:
            if is_error(value) and self.is_owned(id):
                self._outside.error_unseen(value)
            return False
        for waiter in waiters or ():
            _notify(waiter, entry)
        return True

    def watch(self, watcher: Callable[[Entry], None]) -> None:
        """Call ``watcher(entry)`` for every value that comes, until ``unwatch``.

        For waits for any of many objects: a waiter at each would cost a turn over all of them,
        again and again in a loop that takes them one by one.
        """
        with self.lock:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[Entry], None]) -> None:
        with self.lock:
            self._watchers.remove(watcher)

    def forget_value(self, id: bytes) -> Value | None:
        """Make an object pending again, because its value was lost; return the old value."""
        with self.lock:
            entry = self._entries.get(id)
            if entry is None or entry.value is None:
                return None
            value, entry.value = entry.value, None
            entry.wanted = False
            entry.copies = frozenset()
            return value

    def when_ready(self, entry: Entry, waiter: Callable[[Entry], None]) -> bool:
        """Call ``waiter(entry)`` once there is a value; True if there is one already."""
        with self.lock:
            if entry.value is not None:
                return True
            if entry.waiters is None:
                entry.waiters = [waiter]
            else:
                entry.waiters.append(waiter)
        return False

    def drop_waiter(self, entry: Entry, waiter: Callable[[Entry], None]) -> None:
        with self.lock:
            if entry.waiters is not None and waiter in entry.waiters:
                entry.waiters.remove(waiter)

    # --- counts ------------------------------------------------------------------
    def pin(self, id: bytes) -> None:
        """Keep an object for ever: the copies of its ref cannot be counted."""
        with self.lock:
            entry = self._entries.get(id)
            if entry is not None:
                entry.local += 1
                self.pickled[id] = self.pickled.get(id, 0) + 1

    def drop(self, ids: Iterable[bytes]) -> None:
        """Count refs that went away, and release objects without a holder."""
        gone: list[Entry] = []
        entries = self._entries
        with self.lock:
            for id in ids:
                entry = entries.get(id)
                if entry is None:
                    continue
                entry.local -= 1
                if entry.local <= 0 and not entry.borrowers:
                    del entries[id]
                    gone.append(entry)
        for entry in gone:
            self._release(entry)

    def borrow(self, id: bytes, borrower: bytes) -> bool:
        """Count a borrower of an object owned here; False if the object does not exist."""
        with self.lock:
            entry = self._entries.get(id)
            if entry is None:
                return False
            self._count(entry, borrower, 1)
            if entry.local > 0 or entry.borrowers:
                return True
            # This made up for a release that came first, and there is no other holder.
            del self._entries[id]
        self._release(entry)
        return True

    def unborrow(self, id: bytes, borrower: bytes) -> None:
        """Uncount a borrower of an object owned here."""
        with self.lock:
            entry = self._entries.get(id)
            if entry is None:
                return
            self._count(entry, borrower, -1)
            if entry.local > 0 or entry.borrowers:
                return
            del self._entries[id]
        self._release(entry)

    def borrower_died(self, borrower: bytes) -> None:
        """Forget a process that ended as a borrower of objects owned here."""
        gone = []
        with self.lock:
            for id in self._held_by.pop(borrower, ()):
                entry = self._entries.get(id)
                if entry is None or not entry.borrowers:
                    continue
                entry.borrowers.pop(borrower, None)
                if entry.local <= 0:
                    self._forget_unreported(entry)
                if entry.local <= 0 and not entry.borrowers:
                    del self._entries[id]
                    gone.append(entry)
        for entry in gone:
            self._release(entry)

    def _forget_unreported(self, entry: Entry) -> None:
        """Drop counts below zero of an object without a holder.

        A process lets go only after it has reported that another one holds the object. If no
        holder is left, the report died with a process.
        """
        borrowers = entry.borrowers or {}
        if not any(count > 0 for count in borrowers.values()):
            for borrower, count in list(borrowers.items()):
                self._count(entry, borrower, -count)

    def _count(self, entry: Entry, borrower: bytes, step: int) -> None:
        if entry.borrowers is None:
            entry.borrowers = {}
        count = entry.borrowers.get(borrower, 0) + step
        held = self._held_by.setdefault(borrower, set())
        if count:
            entry.borrowers[borrower] = count
            held.add(entry.id)
            return
        entry.borrowers.pop(borrower, None)
        held.discard(entry.id)
        if not held:
            del self._held_by[borrower]

    def _release(self, entry: Entry) -> None:
        if entry.fetch is not None:
            entry.fetch.cancel()
        if not self.is_owned(entry.id):
            if entry.registered:
                self._outside.unborrow(entry.id, entry.owner_node)
            return
        if entry.id in self._actors:
            self._actors.discard(entry.id)
            self._outside.actor_unreferenced(entry.id)
            return
        value = entry.value
        if value is not None and is_shared(value):
            self._outside.free_shared(value)
        elif value is not None and is_error(value) and not getattr(entry, "seen", False):
            self._outside.error_unseen(value)
        if entry.kept:
            self._outside.origin_unused(entry.id)


def _notify(waiter: Callable[[Entry], None], entry: Entry) -> None:
    """Call a waiter; log its exception, as when its event loop was closed."""
    try:
        waiter(entry)
    except Exception:
        logger.exception("a waiter for object %s failed", entry.id.hex())
