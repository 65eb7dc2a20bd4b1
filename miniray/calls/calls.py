"""Calls that this process has made: arguments, dependencies, replies, retries.

A call goes through its *channel* (an actor's, or the leases of a task's shape),
which decides when and where it is sent. What every call has in common is here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import threading
from typing import TYPE_CHECKING, Any

from miniray.calls.argument_errors import error_of_call
from miniray.calls.lineage import Lineage
from miniray.common.config import config
from miniray.common.object_ref import ObjectRef
from miniray.exceptions import ObjectLostError, TaskCancelledError, TaskError
from miniray.messages import protocol as p
from miniray.objects.borrowing import error_value, load_error
from miniray.values.serialization import Serialized, serialize_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miniray.calls.call import Call, RefArgument
    from miniray.objects.borrowing import Borrowing
    from miniray.objects.objects import Entry, ObjectTable, Value
    from miniray.objects.shared_memory import SharedMemory
    from miniray.objects.streams import StreamState
    from miniray.wire.peers import Peer

logger = logging.getLogger(__name__)

_NO_ARGUMENTS = Serialized(p.VALUE_PICKLE, [pickle.dumps(((), {}), 5)])
#: Why a ref of an earlier ``init()`` has no value.
NOT_ATTACHED = "this process is not attached to its cluster any more"
_NO_VALUES: Value = (p.VALUE_PICKLE, _NO_ARGUMENTS.payload(), ())


class CallTable:
    """The calls in flight of this process. Thread-safe."""

    def __init__(
        self,
        table: ObjectTable,
        borrowing: Borrowing,
        shared_memory: SharedMemory,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._table = table
        self._call_later = call_later
        self._borrowing = borrowing
        self._shared_memory = shared_memory
        self.next_number = itertools.count(1).__next__
        self.open: dict[int, Call] = {}
        #: Open calls by what they make. None until one is looked for, which is seldom, and then
        #: until none is open: whoever cancels one call often cancels many.
        self._by_id: dict[bytes, Call] | None = None
        tunables = config()
        self.lineage = Lineage(
            tunables.lineage_calls,
            tunables.lineage_bytes,
            tunables.lineage_pinned_bytes,
            self._size_of,
        )
        #: Makes a lost value again, or tells why not; see ``recovery.py``.
        self.recover: Callable[[Entry, Value], str | None]
        #: Called for each call that has ended.
        self.on_ended: Callable[[Call], None] | None = None
        self._lock = threading.RLock()  # a collection in here may drop a ref

    # --- submitting ----------------------------------------------------------------
    @staticmethod
    def serialize(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Serialized, list[RefArgument], list[ObjectRef[Any]] | None]:
        """Serialize arguments: the value, its top-level refs, and what must stay alive.

        User code may run in it; nothing is left of it if that is cut off.
        """
        if not args and not kwargs:
            return _NO_ARGUMENTS, [], None
        refs: list[RefArgument] = []
        pins: list[ObjectRef[Any]] | None = None
        for argument in args:
            if isinstance(argument, ObjectRef):
                args, kwargs, refs, pins = _take_refs(args, kwargs)
                break
        else:
            for argument in kwargs.values():
                if isinstance(argument, ObjectRef):
                    args, kwargs, refs, pins = _take_refs(args, kwargs)
                    break
        serialized = serialize_arguments(args, kwargs)
        if serialized.refs:
            pins = [*(pins or ()), *serialized.refs]
        if serialized.size > config().large_closure_warning:
            from miniray.values.closures import warn_large_arguments

            warn_large_arguments(args, kwargs, serialized.size)
        return serialized, refs, pins

    def store(self, serialized: Serialized) -> Value:
        """Arguments as they travel; what is large is written into shared memory."""
        if serialized is _NO_ARGUMENTS:
            return _NO_VALUES
        if serialized.size > config().inline_limit:
            table = self._table
            return self._shared_memory.write(serialized, table.process_id, table.node_id)
        contained = tuple((ref.binary(), ref._owner_node) for ref in serialized.refs)
        return serialized.form, serialized.payload(), contained

    def open_call(self, call: Call) -> bool:
        """Register a call before it is sent; False if its channel will hear when it can be."""
        self.open[call.number] = call
        if self._by_id is not None:
            self._enter(call)
        return not call.refs or self._await_dependencies(call)

    def _await_dependencies(self, call: Call) -> bool:
        """Count the refs without a value; the channel hears when the last one has its."""
        pending: list[Entry] = []
        for _, id, _, value in call.refs:
            entry = self._table.entry(id) if value is None else None
            if entry is not None and entry.value is None:
                pending.append(entry)
        if not pending:
            return True
        call.waiting = len(pending) + 1

        def ready(_entry: Entry | None) -> None:
            with self._lock:
                call.waiting -= 1
                done = call.waiting == 0
            if done:
                call.channel.dependencies_ready(call)

        for entry in pending:
            if self._table.when_ready(entry, ready):
                with self._lock:
                    call.waiting -= 1
        self._borrowing.want(pending)
        with self._lock:
            call.waiting -= 1
            return call.waiting == 0

    def resolved_refs(self, call: Call) -> tuple[list[RefArgument], Value | None]:
        """The refs of a call with their values, or its error, if one of them has one."""
        resolved: list[RefArgument] = []
        for where, id, node, known in call.refs:
            entry = self._table.entry(id) if known is None else None
            if known is None and entry is None:
                lost = error_value(ObjectLostError(id.hex(), NOT_ATTACHED))
                return resolved, error_of_call(lost, call.name, where)
            value = known if entry is None else entry.value
            if value is not None and value[0] == p.VALUE_ERROR:
                if entry is not None:
                    entry.seen = True  # it is the error of this call too
                return resolved, error_of_call(value, call.name, where)
            resolved.append((where, id, node, value))
        return resolved, None

    def shared_values(self, call: Call) -> list[Value]:
        """What a call reads from shared memory: its arguments and the refs among them."""
        found = [call.arguments] if call.arguments[0] == p.VALUE_SHARED else []
        for _, id, _, value in call.refs:
            if value is None:
                entry = self._table.entry(id)
                value = None if entry is None else entry.value  # noqa: PLW2901
            if value is not None and value[0] == p.VALUE_SHARED:
                found.append(value)
        return found

    def copies(self, call: Call) -> list[tuple[bytes, int]]:
        """Nodes to which calls have brought values of this call's refs, and their sizes."""
        found = []
        for _, id, _, _ in call.refs:
            entry = self._table.entry(id)
            found += [(node, self._size_of(id)) for node in getattr(entry, "copies", ())]
        return found

    def note_copies(self, call: Call, node: bytes) -> None:
        """A call has brought what its refs have in shared memory to the node where it ran."""
        for _, id, _, _ in call.refs:
            entry = self._table.entry(id)
            value = None if entry is None else entry.value
            if entry is None or value is None or value[0] != p.VALUE_SHARED:
                continue
            if value[1][0] != node:
                entry.copies = getattr(entry, "copies", frozenset()) | {node}

    def find(self, id: bytes) -> Call | None:
        """The open call that makes an object."""
        with self._lock:
            if self._by_id is None:
                self._by_id = {}  # before the look at all: what is opened meanwhile enters itself
                for call in list(self.open.values()):
                    self._enter(call)
            return self._by_id.get(id)

    def _enter(self, call: Call) -> None:
        with self._lock:
            if self._by_id is not None and call.number in self.open:
                self._by_id.update(dict.fromkeys(call.cancel_ids, call))

    def _leave(self, call: Call) -> None:
        with self._lock:
            if not self.open:
                self._by_id = None
            elif self._by_id is not None:
                for id in call.cancel_ids:
                    self._by_id.pop(id, None)

    # --- results -----------------------------------------------------------------
    def on_reply(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_REPLY: the call ended at its executor."""
        _, number, status, values, borrowed = message[:5]
        call = self.open.get(number)
        if borrowed:
            self._borrowing.report_for(peer, borrowed)
        if call is None or (call.peer is not peer and call.peer is not None):
            self._discard(peer, message)
            return
        failure = None
        if status != p.STATUS_OK or (values and values[-1][0] == p.VALUE_ERROR):
            failure = _failure(status, values)
        if failure is not None and self._retry_exception(call, failure):
            self._discard(peer, message)
            return
        if status == p.STATUS_OK:
            # First: whoever waits for the values may send the next call at once, and its
            # worker is free.
            call.channel.finished(call)
            pinned = False
            if call.repeatable and any(value[0] == p.VALUE_SHARED for value in values):
                self._remember(call, values)
            for id, value in zip(call.return_ids, values, strict=True):
                refs = None
                if value[2]:
                    refs = self._borrowing.hold(value[2])
                    pinned = True
                if not self._table.set_value(id, value, refs, call.name):
                    self.free_value(value)
            if pinned:
                pin = message[6]
                self._borrowing.defer(lambda: peer.send((p.PEER_RELEASE, [pin])))
            self._forget(call)
        elif status == p.STATUS_ERROR:
            self.fail_value(call, values[0])
        elif status == p.STATUS_LOST:
            self._arguments_lost(call, values)
        else:
            if call.stream is not None:
                call.stream.end(None)
            self.close(call)

    def _remember(self, call: Call, values: Sequence[Value]) -> None:
        """Keep what it takes to run a task again whose results are in shared memory."""
        refs, error = self.resolved_refs(call)
        if error is not None:
            return
        pins = self._pins(call, values)
        with self._table.lock:
            found = [self._table.entry(id) for id in call.return_ids]
            living = [entry for entry in found if entry is not None]
            if living and self.lineage.keep(call, refs, len(living), pins):
                for entry in living:
                    entry.kept = True
        self.free_unneeded()

    def _pins(self, call: Call, values: Iterable[Value]) -> list[ObjectRef[Any]] | None:
        """What to keep alive of a call's arguments; None if no result is on another node.

        Those of this node are lost with this process. Actors end with their handles all the same.
        """
        here = self._table.node_id
        if all(value[0] != p.VALUE_SHARED or value[1][0] == here for value in values):
            return None
        return [ref for ref in call.pins or () if not self._table.is_actor(ref.binary())]

    def _size_of(self, id: bytes) -> int:
        entry = self._table.entry(id)
        value = None if entry is None else entry.value
        if value is None:
            return 0
        return int(value[1][2]) if value[0] == p.VALUE_SHARED else len(value[1])

    def free_unneeded(self) -> None:
        """Free arguments that were kept to run a task again, and are not any more."""
        with contextlib.suppress(IndexError):  # another thread may take some of them
            while True:
                self.free_value(self.lineage.unneeded.popleft())

    def remember_item(self, call: Call, stream: StreamState, value: Value) -> None:
        """Keep what it takes to make the last item of a generator again, which is shared memory."""
        if stream.origin is None:
            refs, error = self.resolved_refs(call)
            if error is None:
                pins = self._pins(call, [value])
                stream.origin = self.lineage.stream(call, refs, stream.ids, pins)
        if stream.origin is None:
            return
        with self._table.lock:
            entry = self._table.entry(stream.ids[-1])
            if entry is not None:
                self.lineage.keep_item(stream.origin, entry.id)
                entry.kept = True
        self.free_unneeded()

    def _arguments_lost(self, call: Call, lost: Any) -> None:
        """A call could not begin, because values of its refs are gone: make them again."""
        for id, payload in lost:
            entry = self._table.entry(id)
            value = None if entry is None else entry.value
            if entry is None or value is None or value[1] != payload:
                continue
            reason = self.recover(entry, value)
            if reason is not None:
                where = next(where for where, ref, _, _ in call.refs if ref == id)
                value = error_value(ObjectLostError(id.hex(), reason))
                self.fail_value(call, error_of_call(value, call.name, where))
                return
        call.waiting = 1  # so that nothing sends it before the rest is known
        call.channel.withdraw(call)
        if self._await_dependencies(call):
            call.waiting = 0
            call.channel.dependencies_ready(call)

    def _retry_exception(self, call: Call, value: Value) -> bool:
        """Have a call run again whose user code raised, if its options say so."""
        if not call.retry_exceptions or call.retries == 0 or call.cancelled:
            return False
        wanted = call.retry_exceptions
        if isinstance(wanted, tuple) and not isinstance(_cause_of(value), wanted):
            return False
        self.run_later(call, call.try_again())
        return True

    def run_later(self, call: Call, seconds: float) -> None:
        """Send a call once more after a while, in which it holds no lease."""
        call.channel.finished(call)
        call.peer = None

        def over() -> None:
            if call.number not in self.open:
                return
            if call.cancelled:  # while its error was on the way
                self.fail(call, TaskCancelledError(call.name))
            else:
                call.channel.retry(call)

        self._call_later(seconds, over)

    def fail(self, call: Call, error: BaseException) -> None:
        """End a call with an error of the runtime."""
        self.fail_value(call, error_value(error))

    def fail_value(self, call: Call, value: Value) -> None:
        """End a call with an error value."""
        told = not call.cancelled or call.stream is not None
        if not told and not isinstance(_cause_of(value), TaskCancelledError):
            value = error_value(TaskCancelledError(call.name))
        for id in call.return_ids:
            self._table.set_value(id, value, None, call.name)
        if call.stream is not None:
            call.stream.end(value)
        self.close(call)

    def sent(self, call: Call) -> None:
        """A call is on its way that nobody replies to; what it holds is kept until ``close``."""
        self.open.pop(call.number, None)
        if self._by_id is not None:
            self._leave(call)
        if self.on_ended is not None:
            self.on_ended(call)

    def close(self, call: Call) -> None:
        """Forget a call that has its result."""
        self._forget(call)
        call.channel.finished(call)

    def _forget(self, call: Call) -> None:
        self.open.pop(call.number, None)
        if self._by_id is not None:
            self._leave(call)
        if call.siblings is not None:
            call.siblings.pop(call.number, None)
        call.pins = None
        if call.origin is not None:
            self.lineage.ended(call.origin)
            call.origin, call.arguments = None, _NO_VALUES  # they are that one's
            self.free_unneeded()
        elif call.arguments[0] == p.VALUE_SHARED:
            self.free_value(call.arguments)
        if self.on_ended is not None:
            self.on_ended(call)

    def _discard(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """Drop a reply that nobody waits for any more."""
        if message[2] != p.STATUS_OK:
            return
        for value in message[3]:
            self.free_value(value)
        if any(value[2] for value in message[3]):  # the executor keeps those refs until it hears
            peer.send((p.PEER_RELEASE, [message[6]]))

    def free_value(self, value: Value) -> None:
        """A value that nobody will read: free its shared memory."""
        if value[0] == p.VALUE_SHARED:
            self._shared_memory.free(value)


def _failure(status: int, values: Sequence[Value]) -> Value | None:
    """The error of a call that has one: of all of it, or where a generator failed after some."""
    if status == p.STATUS_OK:
        return values[-1]
    return values[0] if status == p.STATUS_ERROR else None


def _take_refs(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[RefArgument], list[ObjectRef[Any]]]:
    """Take the top-level refs out of the arguments; None stands in their places."""
    positional = list(args)
    named = dict(kwargs)
    refs: list[RefArgument] = []
    pins: list[ObjectRef[Any]] = []
    places: list[tuple[Any, int | str]] = [(positional, i) for i in range(len(positional))]
    places += [(named, name) for name in named]
    for container, place in places:
        argument = container[place]
        if isinstance(argument, ObjectRef):
            container[place] = None
            refs.append((place, argument.binary(), argument._owner_node, None))
            pins.append(argument)
    return tuple(positional), named, refs, pins


def _cause_of(value: Value) -> BaseException | None:
    """What was raised, of an error value; None if it cannot be loaded here."""
    error = load_error(value)
    return error.cause if isinstance(error, TaskError) else error
