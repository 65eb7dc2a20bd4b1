"""Calls that this process has made: the one owner of each call's life.

A call begins in ``submit`` and ends once: with the reply of its executor (``on_reply``), or with an
error of the runtime (``fail``). In between it may be sent again. When and where it is sent is
decided by its *channel*: an actor's client, or the leases of a task's shape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

from miniray.calls.call import NO_ARGUMENTS, NO_VALUES, EndedCalls, count, error_of_call
from miniray.calls.lineage import Lineage
from miniray.common.config import config
from miniray.common.object_ref import ObjectRef, owner_of
from miniray.common.series import QUICK
from miniray.exceptions import ObjectLostError, TaskCancelledError, TaskError
from miniray.messages import protocol as p
from miniray.messages.value import (
    error_value,
    is_error,
    is_shared,
    load_error,
    node_of,
    payload_of,
    refs_in,
    size_of,
)
from miniray.wire.interrupts import uncut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miniray.calls.call import Call, RefArgument
    from miniray.messages.value import Value
    from miniray.objects.borrowing import Borrowing
    from miniray.objects.object_ref_generator import StreamState
    from miniray.objects.objects import Entry, ObjectTable
    from miniray.objects.shared_memory import SharedMemory
    from miniray.values.serialization import Serialized
    from miniray.wire.node_link import NodeLink
    from miniray.wire.peers import Peer, PeerTable

logger = logging.getLogger(__name__)

#: Why a ref of an earlier ``init()`` has no value.
NOT_ATTACHED = "this process is not attached to its cluster any more"


@dataclasses.dataclass(eq=False, repr=False)
class CallTable:
    """The calls in flight of this process. Thread-safe."""

    _table: ObjectTable
    _borrowing: Borrowing
    #: Where large arguments go.
    _shared_memory: SharedMemory
    _peers: PeerTable
    #: To the daemon; answers need it.
    _link: NodeLink
    #: Runs a function after a number of seconds.
    _call_later: Callable[[float, Callable[[], None]], object]
    #: Makes a lost value again, or returns why not; see ``recovery.py``.
    _recover: Callable[[Entry, Value], str | None]

    def __post_init__(self) -> None:
        self.next_number = itertools.count(1).__next__
        self.open: dict[int, Call] = {}
        self.ended = EndedCalls()
        #: Open calls by what they make. None until one is looked for, which is seldom, and then
        #: until none is open: a program that cancels one call often cancels many.
        self._by_id: dict[bytes, Call] | None = None
        tunables = config()
        self.lineage = Lineage(tunables.lineage_calls, tunables.lineage_bytes)
        #: Numbers of the calls whose end is waited for, and the callback for the last one.
        self._awaited: set[int] = set()
        self._on_all_ended: Callable[[], object] = self._awaited.clear
        self._lock = threading.RLock()  # a collection in here may drop a ref

    # --- beginning -----------------------------------------------------------------
    def store(self, serialized: Serialized) -> Value:
        """Make a value of arguments, in shared memory if they are large."""
        if serialized is NO_ARGUMENTS:
            return NO_VALUES
        if serialized.size > config().inline_limit:
            table = self._table
            return self._shared_memory.write(serialized, table.process_id, table.node_id)
        return serialized.value()

    def submit(self, call: Call) -> None:
        """Register a call and have its channel send it, as soon as its refs have values.

        Raises:
            PendingCallsLimitExceededError: Its channel takes no more.
        """
        self.open[call.number] = call
        if self._by_id is not None:
            self._enter(call)
        try:
            call.channel.submit(call, not call.refs or self._await_dependencies(call))
        except BaseException:
            self._end(call)
            raise
        if self._link.lost:  # checked after the call is open: it fails here, or with all that are
            self.fail(call, self._link.end())

    def _await_dependencies(self, call: Call) -> bool:
        """Return whether all refs of a call have values; else notify its channel once they do."""
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
                call.channel.ready(call)

        for entry in pending:
            if self._table.when_ready(entry, ready):
                with self._lock:
                    call.waiting -= 1
        self._borrowing.want(pending)
        with self._lock:
            call.waiting -= 1
            return call.waiting == 0

    # --- what its channel needs ----------------------------------------------------
    def resolved_refs(self, call: Call) -> tuple[list[RefArgument], Value | None]:
        """Return the refs of a call with their values, or its error, if one of them has one."""
        resolved: list[RefArgument] = []
        for where, id, node, known in call.refs:
            entry = self._table.entry(id) if known is None else None
            if known is None and entry is None:
                lost = error_value(ObjectLostError(id.hex(), NOT_ATTACHED))
                return resolved, error_of_call(lost, call.name, where)
            value = known if entry is None else entry.value
            if value is not None and is_error(value):
                if entry is not None:
                    entry.seen = True  # it is the error of this call too
                return resolved, error_of_call(value, call.name, where)
            resolved.append((where, id, node, value))
        return resolved, None

    def shared_values(self, call: Call) -> list[Value]:
        """Return what a call reads from shared memory: its arguments and the refs among them."""
        found = [call.arguments] if is_shared(call.arguments) else []
        for _, id, _, value in call.refs:
            if value is None:
                entry = self._table.entry(id)
                value = None if entry is None else entry.value  # noqa: PLW2901
            if value is not None and is_shared(value):
                found.append(value)
        return found

    def copies(self, call: Call) -> list[tuple[bytes, int]]:
        """Return the nodes to which calls have brought values of a call's refs, and the sizes."""
        found = []
        for _, id, _, _ in call.refs:
            entry = self._table.entry(id)
            found += [(node, self._size_of(id)) for node in getattr(entry, "copies", ())]
        return found

    def _note_copies(self, call: Call, node: bytes) -> None:
        """Note that a call has brought what its refs have in shared memory to a node."""
        for _, id, _, _ in call.refs:
            entry = self._table.entry(id)
            value = None if entry is None else entry.value
            if entry is None or value is None or not is_shared(value):
                continue
            if node_of(value) != node:
                entry.copies = getattr(entry, "copies", frozenset()) | {node}

    # --- finding -----------------------------------------------------------------
    def find(self, id: bytes) -> Call | None:
        """Return the open call that makes an object."""
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

    def when_ended(self, which: Callable[[Call], bool], callback: Callable[[], object]) -> bool:
        """Call back once all open calls that ``which`` chooses have ended; True if there are none.

        A later wait replaces an earlier one.
        """
        awaited = {0}  # no call's: until all are in, the last of them cannot end
        self._awaited, self._on_all_ended = awaited, callback  # calls that end now leave it
        awaited.update(call.number for call in list(self.open.values()) if which(call))
        awaited.intersection_update(self.open)
        return not awaited

    def _note_end(self, call: Call) -> None:
        if call.number in self._awaited:
            self._awaited.discard(call.number)
            if not self._awaited:
                self._on_all_ended()

    # --- replies -----------------------------------------------------------------
    def on_reply(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_REPLY: take the results of a call, or its error, or have it sent once more."""
        _, number, status, values, borrowed, seconds, pin = message
        call = self.open.get(number)
        if borrowed:
            self._borrowing.report_for(peer, borrowed)
        if call is None or (call.peer is not peer and call.peer is not None):
            self._discard(peer, status, values, pin)
            return
        if call.refs and status != p.STATUS_LOST:
            self._note_copies(call, peer.node_id)
        # First: a thread that waits for the values may send the next call at once, to a worker
        # that is free.
        call.channel.answered(call, None if status == p.STATUS_LOST else seconds)
        failure = None
        if status != p.STATUS_OK or (values and is_error(values[-1])):
            failure = _failure(status, values)
        if failure is not None and self._retry_exception(call, failure):
            self._discard(peer, status, values, pin)
        elif status == p.STATUS_OK:
            times = call.channel.finished.get(call.name)
            if times is not None and seconds <= QUICK:  # as ``took``, which costs twice as much
                times[0] += 1
                times[-1] += seconds
            else:
                count(call.channel.finished, call.name, seconds)
            self._set_results(call, values)
            if pin:  # the executor keeps the refs in the values until they are counted here
                self._borrowing.defer(lambda: peer.send((p.PEER_RELEASE, [pin])))
            self._end(call)
        elif failure is not None:
            self.fail_value(call, failure, seconds)
        elif status == p.STATUS_LOST:
            self._arguments_lost(call, values)
        else:
            count(call.channel.finished, call.name, seconds)
            if call.stream is not None:
                call.stream.end(None)
            self._end(call)

    def _set_results(self, call: Call, values: Sequence[Value]) -> None:
        if call.repeatable and any(map(is_shared, values)):
            self._remember(call, values)
        for id, value in zip(call.return_ids, values, strict=True):
            _, _, contained = value
            refs = self._borrowing.hold(contained) if contained else None
            if not self._table.set_value(id, value, refs, call.name):
                self.free_value(value)

    def _discard(self, peer: Peer, status: int, values: Sequence[Value], pin: int) -> None:
        """Drop a reply whose call is forgotten."""
        if status != p.STATUS_OK:
            return
        for value in values:
            self.free_value(value)
        if any(map(refs_in, values)):  # the executor keeps those refs until then
            peer.send((p.PEER_RELEASE, [pin]))

    def on_stream_item(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_STREAM: take an item of a generator."""
        _, number, index, value, pin = message
        call = self.open.get(number)
        contained = refs_in(value)
        refs = self._borrowing.hold(contained) if contained else None
        stream = None if call is None else call.stream
        if call is None or stream is None:
            self.free_value(value)
        elif stream.item(index, value, refs, call.name):
            if call.repeatable and is_shared(value) and index < len(stream.ids):
                self._remember_item(call, stream, value)
        elif not self._came_again(stream, index, value, refs):
            self.free_value(value)
        if refs:
            self._borrowing.defer(lambda: peer.send((p.PEER_RELEASE, [pin])))

    # --- running again -------------------------------------------------------------
    def _came_again(
        self, stream: StreamState, index: int, value: Value, refs: list[ObjectRef[Any]] | None
    ) -> bool:
        """Let an item of a call that runs again replace the one on another node.

        The other one may be lost, and a further call could not make it: an actor runs that call
        after this one, which waits until its items are read.
        """
        if index >= len(stream.ids) or not is_shared(value):
            return False
        id = stream.ids[index]
        with self._table.lock:
            entry = self._table.entry(id)
            old = None if entry is None else entry.value
            if old is not None and (not is_shared(old) or node_of(old) == node_of(value)):
                return False
            self._table.forget_value(id)
        if old is not None:
            self.free_value(old)
        return self._table.set_value(id, value, refs)

    def _remember(self, call: Call, values: Sequence[Value]) -> None:
        """Keep what a task needs to run again if its results are in shared memory."""
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

    def _remember_item(self, call: Call, stream: StreamState, value: Value) -> None:
        """Keep what a generator needs to make its last item, in shared memory, again."""
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

    def _pins(self, call: Call, values: Iterable[Value]) -> list[ObjectRef[Any]] | None:
        """Return what to keep alive of a call's arguments; None if no result is on another node.

        Results on this node are lost with this process. Actors end with their handles all the same.
        """
        here = self._table.node_id
        if all(not is_shared(value) or node_of(value) == here for value in values):
            return None
        return [ref for ref in call.pins or () if not self._table.is_actor(ref.binary())]

    def _size_of(self, id: bytes) -> int:
        entry = self._table.entry(id)
        return 0 if entry is None else size_of(entry.value)

    def free_unneeded(self) -> None:
        """Free arguments that were kept to run a task again, and are not any more."""
        with contextlib.suppress(IndexError):  # another thread may take some of them
            while True:
                self.free_value(self.lineage.unneeded.popleft())

    def _arguments_lost(self, call: Call, lost: Any) -> None:
        """Have values made again that were gone when a call was to begin, and send it once more."""
        for id, location in lost:
            entry = self._table.entry(id)
            value = None if entry is None else entry.value
            if entry is None or value is None or payload_of(value) != location:
                continue
            reason = self._recover(entry, value)
            if reason is not None:
                where = next(where for where, ref, _, _ in call.refs if ref == id)
                value = error_value(ObjectLostError(id.hex(), reason))
                self.fail_value(call, error_of_call(value, call.name, where))
                return
        call.waiting = 1  # so that it is not sent before the rest is known
        call.channel.put_back(call)
        if self._await_dependencies(call):
            call.waiting = 0
            call.channel.ready(call)

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
        """Send a call once more after a while, in which its channel does not have it."""
        call.peer = None

        def over() -> None:
            if call.number in self.open:
                call.channel.put_back(call)
                call.channel.ready(call)

        self._call_later(seconds, over)

    # --- cancelling ----------------------------------------------------------------
    def cancel(self, ref: ObjectRef[Any], force: bool, recursive: bool) -> None:
        """Cancel the call that makes a ref, through the process that made the call.

        Raises:
            ValueError: ``force`` would end an actor.
        """
        id = ref.binary()
        if not self._table.is_owned(id):
            maker = self._peers.get(ref._owner_node, owner_of(id))
            maker.send((p.PEER_CANCEL_MAKER, id, force, recursive))
            return
        call = self.find(id)
        if call is None:
            return  # finished already
        if force and not call.channel.takes_force:
            raise ValueError(
                "force=True would end the actor and cannot be used to cancel one of its calls; "
                "use miniray.kill() to end the actor."
            )
        self.cancel_call(call, force=force, recursive=recursive)

    @uncut
    def cancel_call(self, call: Call, *, force: bool = False, recursive: bool = True) -> None:
        """Cancel a call that has not ended."""
        call.cancelled = True
        call.channel.cancel(call, force, recursive)

    def on_cancel_asked(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_CANCEL_MAKER: cancel a call for a process that was given a ref of it."""
        _, id, force, recursive = message
        try:
            self.cancel(ObjectRef(id, b""), force, recursive)
        except ValueError as error:
            logger.warning("process %s requested a cancel: %s", peer.process_id.hex(), error)

    # --- ending ------------------------------------------------------------------
    def fail(self, call: Call, error: BaseException) -> None:
        """End a call with an error of the runtime, if it has not ended."""
        self.fail_value(call, error_value(error))

    def fail_value(self, call: Call, value: Value, seconds: float = 0.0) -> None:
        """End a call with an error value, if it has not ended; it ran for ``seconds``."""
        if call.number not in self.open:
            return
        self.ended.failed(call, seconds)
        told = not call.cancelled or call.stream is not None
        if not told and not isinstance(_cause_of(value), TaskCancelledError):
            value = error_value(TaskCancelledError(call.name))
        for id in call.return_ids:
            self._table.set_value(id, value, None, call.name)
        if call.stream is not None:
            call.stream.end(value)
        self._end(call)

    def _end(self, call: Call) -> None:
        """Forget a call that has its result, and release what it holds; once."""
        if self.open.pop(call.number, None) is None:
            return
        if self._by_id is not None:
            self._leave(call)
        if call.siblings is not None:
            call.siblings.pop(call.number, None)
        self.release(call)
        if self._awaited:
            self._note_end(call)

    def sent(self, call: Call) -> None:
        """Forget a call that gets no reply; what it holds is kept until ``release``."""
        self.open.pop(call.number, None)
        if self._by_id is not None:
            self._leave(call)
        if self._awaited:
            self._note_end(call)

    def release(self, call: Call) -> None:
        """Let go of what a call holds: its arguments, and the refs in them."""
        call.pins = None
        if call.origin is not None:
            self.lineage.ended(call.origin)
            call.origin, call.arguments = None, NO_VALUES  # they are that one's
            self.free_unneeded()
        elif is_shared(call.arguments):
            self.free_value(call.arguments)

    def free_value(self, value: Value) -> None:
        """Free the shared memory of a value that will not be read."""
        if is_shared(value):
            self._shared_memory.free(value)


def _failure(status: int, values: Sequence[Value]) -> Value | None:
    """Return the error of a call: of all of it, or where a generator failed after some results."""
    if status == p.STATUS_OK:
        return values[-1]
    return values[0] if status == p.STATUS_ERROR else None


def _cause_of(value: Value) -> BaseException | None:
    """Return what an error value was raised with; None if it cannot be loaded here."""
    error = load_error(value)
    return error.cause if isinstance(error, TaskError) else error
