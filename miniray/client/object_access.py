"""put, get, wait, futures and await: the values of objects."""

from __future__ import annotations

import concurrent.futures
import contextlib
import pickle
import threading
from typing import TYPE_CHECKING, Any

from miniray.calls.calls import NOT_ATTACHED
from miniray.calls.recovery import is_shared
from miniray.client.ref_tracking import RefTracking
from miniray.client.waiting_news import TO_HEAR_WHY, why_missing
from miniray.common.config import config
from miniray.common.names import call_site, describe, printable
from miniray.common.object_ref import ObjectRef, hooks
from miniray.exceptions import (
    GetTimeoutError,
    MinirayError,
    ObjectLostError,
    TaskError,
)
from miniray.messages import protocol as p
from miniray.objects import waiting
from miniray.objects.object_ref_generator import ObjectRefGenerator
from miniray.values.serialization import deserialize, serialize
from miniray.wire.interrupts import uncut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.objects.fetches import Fetches
    from miniray.objects.objects import Entry, Value
    from miniray.objects.shared_memory import Block, Mapping
    from miniray.values.serialization import Serialized

#: Seconds in which a value that is on this node should be mapped, whatever timeout is given.
_TO_MAP = 1.0
#: Values behind those that ``wait`` returns as ready that it has brought to this node. So few that
#: a loop which takes one value at a time stays linear.
_NEXT = 4
#: Values of futures that are read at once at most: some may take long.
_FUTURE_THREADS = 32


class ObjectAccess(RefTracking):
    """Values, from wherever they are."""

    _lock: threading.RLock
    _futures: concurrent.futures.ThreadPoolExecutor | None

    def put(self, value: Any) -> ObjectRef[Any]:
        if hooks.dropped:
            self.drain()
        serialized = serialize(value)
        if serialized.size > self.shared_memory.plain_limit:
            return self._put_recorded(serialized)
        contained = tuple((r.binary(), r._owner_node) for r in serialized.refs)
        stored = (serialized.form, serialized.payload(), contained)
        return self.table.create_with_value(self.ids.new(), stored, list(serialized.refs) or None)

    @uncut  # the memory would be nobody's; the ref of a small value drops that by itself
    def _put_recorded(self, serialized: Serialized) -> ObjectRef[Any]:
        """Store a value, and where in user code that was: costs nothing beside a large one."""
        made = call_site()
        if serialized.size > config().inline_limit:
            stored = self.shared_memory.write(
                serialized, self.process_id, self.node_id, describe(made)
            )
        else:
            contained = tuple((r.binary(), r._owner_node) for r in serialized.refs)
            stored = (serialized.form, serialized.payload(), contained)
        refs = list(serialized.refs) or None
        ref = self.table.create_with_value(self.ids.new(), stored, refs)
        return self.table.record(ref, made)

    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        if hooks.dropped:
            self.drain()
        deadline = waiting.deadline_of(timeout)
        entries = [self._entry(ref) for ref in refs]
        pending = [entry for entry in entries if entry.value is None]
        if len(pending) > 1:
            pending = list(dict.fromkeys(pending))
        try:
            if pending:
                self._wait_for_all(entries, pending, timeout, deadline)
            if len(entries) == 1:
                return [self._load(entries[0], deadline)]
            return self._load_all(entries, deadline)
        except MinirayError as error:
            if type(error) is not GetTimeoutError:  # which says nothing of what they will be
                for entry in entries:  # one error stands for all that is wrong with them
                    entry.seen = True
            raise

    def _load_all(self, entries: Sequence[Entry], deadline: float | None) -> list[Any]:
        # All of them begin to move while the first is waited for.
        shared = [
            value
            for entry in entries
            if (value := entry.value) is not None
            and value[0] == p.VALUE_SHARED
            and entry.mapping is None
        ]
        ahead = self.shared_memory.fetches.prefetch(shared) if shared else ()
        try:
            return [self._load(entry, deadline) for entry in entries]
        finally:
            if ahead:
                self.shared_memory.fetches.withdraw(ahead)

    def _wait_for_all(
        self,
        entries: Sequence[Entry],
        pending: Sequence[Entry],
        timeout: float | None,
        deadline: float | None,
    ) -> None:
        """Wait until all entries have values; raises as soon as one has failed.

        The others may wait for that one, as processes of a group do in a collective operation,
        and never end.
        """
        failed = [] if len(pending) == len(entries) else [e for e in entries if _is_error(e)]
        if not failed and not self._wait_values(pending, len(pending), timeout, failed=failed):
            missing = [entry for entry in pending if entry.value is None]
            first = (missing or pending)[0].id
            call = self.calls.find(first)
            maker = f", the result of {call.name}" if call is not None else ""
            why = why_missing(self, first) if timeout is not None and timeout >= TO_HEAR_WHY else ""
            name = f"ObjectRef({first.hex()}){maker}"
            if len(entries) == 1:
                told = f"The value of {name}{',' * bool(maker)} was not ready within {timeout:g} s"
            else:
                told = f"{len(missing)} of {len(entries)} values were not ready within "
                told += f"{timeout:g} s; the first is {name}"
            raise GetTimeoutError(printable(f"{told}.{why}"))
        if failed:
            self._load(failed[0], deadline)

    def _load(self, entry: Entry, deadline: float | None) -> Any:
        """The value of an entry; one that was lost is made again if that is possible."""
        while True:
            value = entry.value
            if value is not None:
                if value[0] != p.VALUE_SHARED:
                    return self.load(entry, value)
                try:
                    found = self._map(entry, value, deadline)
                except ObjectLostError as error:
                    self._recover(entry, value, error.reason)
                else:  # what unpickling raises is not about this value: another one may be lost
                    return _unpickled(found)
            if not self._wait_values([entry], 1, waiting.time_left(deadline)):
                raise GetTimeoutError(
                    f"The value of {entry.id.hex()} was lost, and not made again in time."
                )

    def _map(self, entry: Entry, value: Value, deadline: float | None) -> tuple[Mapping, Block]:
        """Shared memory of a value; raises GetTimeoutError if it is not here in time."""
        mapping = entry.mapping
        block = None if mapping is None else mapping.block()
        if mapping is None or block is None:
            left = None if deadline is None else self._time_to_map(entry, value, deadline)
            try:
                mapping, block = self.shared_memory.map(value[1], left)
            except TimeoutError:
                raise GetTimeoutError(
                    f"The value of {entry.id.hex()} is on another node, or on disk, and was not "
                    f"here in time."
                ) from None
            if mapping.may_be_shared:
                entry.mapping = mapping
        return mapping, block

    def _time_to_map(self, entry: Entry, value: Value, deadline: float) -> float:
        """Seconds; what is on this node is mapped even after the deadline."""
        left = waiting.time_left(deadline) or 0.0
        fetches = self.shared_memory.fetches
        if not left and fetches.is_remote(value):
            fetches.look([entry])
            if not fetches.is_here(entry):
                return left
        return max(left, _TO_MAP)

    def _recover(self, entry: Entry, value: Value, why: str) -> None:
        """See to it that a value that could not be loaded is replaced; raises if none can be."""
        reason = self.recovery.lost(entry, value)
        if reason is not None:
            raise ObjectLostError(entry.id.hex(), f"{why}; {reason}") from None

    def lost_on_the_way(self, entry: Entry, value: Value, error: ObjectLostError) -> None:
        """A value that `wait` wanted here is gone: if none can be made, `get` will say so."""
        with contextlib.suppress(ObjectLostError):
            self._recover(entry, value, error.reason)

    def _entry(self, ref: ObjectRef[Any]) -> Entry:
        entry = self.table.entry(ref.binary())
        if entry is None:
            raise ObjectLostError(ref.hex(), NOT_ATTACHED)
        return entry

    @uncut  # the wait itself may be
    def _wait_values(
        self,
        pending: Sequence[Entry],
        needed: int,
        timeout: float | None,
        fetches: Fetches | None = None,
        failed: list[Entry] | None = None,
    ) -> bool:
        self.loop.flush_posted()
        self.borrowing.want(pending)
        return waiting.wait_for(
            self.loop, self.table, pending, needed, timeout, self.block, fetches, failed
        )

    def load(self, entry: Entry, value: Value) -> Any:
        """The Python value of an entry whose value is in the owner's memory; raises what failed."""
        form = value[0]
        if form == p.VALUE_PICKLE:
            return pickle.loads(value[1])
        if form == p.VALUE_ERROR:
            entry.seen = True
            raise self._error_of(value)
        return deserialize(form, value[1])

    def _error_of(self, value: Value) -> BaseException:
        """What an error value raises.

        Made here and not where it is raised: a frame that is in its traceback and has it in a
        variable would be a cycle, which holds the refs of who called until the next garbage
        collection.
        """
        error: BaseException = pickle.loads(value[1])
        self.unseen_errors.raised(error)
        return error.as_instanceof_cause() if isinstance(error, TaskError) else error

    def wait(
        self,
        refs: Sequence[ObjectRef[Any]],
        num_returns: int,
        timeout: float | None,
        fetch_local: bool,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        if hooks.dropped:
            self.drain()
        fetches = self.shared_memory.fetches if fetch_local else None
        try:
            found = self._split(refs, num_returns, fetches)
        except AttributeError:
            if not any(isinstance(ref, ObjectRefGenerator) for ref in refs):
                raise
            return self._wait_streams(refs, num_returns, timeout, fetch_local)
        if found is None:
            pending = self._pending(refs, fetches)
            if fetches is not None and timeout == 0:
                fetches.look(pending)
                pending = self._pending(refs, fetches)
            needed = num_returns - (len(refs) - len(pending))
            if needed > 0:
                self._wait_values(pending, needed, timeout, fetches)
            found = self._split(refs, num_returns, fetches, at_most=True)
            assert found is not None
        elif fetches is not None:
            for ref in found[1][:_NEXT]:  # those that are taken next: bring them here meanwhile
                entry = self.table.entry(ref._id)
                if entry is not None and entry.value is not None:
                    fetches.bring(entry, entry.value)
        return found

    def _pending(self, refs: Sequence[ObjectRef[Any]], fetches: Fetches | None) -> list[Entry]:
        entries = map(self._entry, refs)
        if fetches is None:
            return [entry for entry in entries if entry.value is None]
        return [entry for entry in entries if not fetches.is_here(entry)]

    def _wait_streams(
        self,
        refs: Sequence[Any],
        num_returns: int,
        timeout: float | None,
        fetch_local: bool,
    ) -> tuple[list[Any], list[Any]]:
        """``wait`` with generators among the refs: they are ready when they have an item."""
        given = {
            (ref._next_ref() if isinstance(ref, ObjectRefGenerator) else ref): ref for ref in refs
        }
        ready, rest = self.wait(list(given), num_returns, timeout, fetch_local)
        return [given[ref] for ref in ready], [given[ref] for ref in rest]

    def _split(
        self,
        refs: Sequence[ObjectRef[Any]],
        wanted: int,
        fetches: Fetches | None,
        *,
        at_most: bool = False,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]] | None:
        """The first ``wanted`` ready refs and the rest; None if there are fewer.

        Stops looking when it has enough, so that a loop that takes one at a time
        does not look at all of them each time.
        """
        ready: list[ObjectRef[Any]] = []
        rest: list[ObjectRef[Any]] = []
        find = self.table.entry
        for index, ref in enumerate(refs):
            entry = find(ref._id) or self._entry(ref)
            if entry.value is None or (fetches is not None and not fetches.is_here(entry)):
                rest.append(ref)
                continue
            ready.append(ref)
            if len(ready) == wanted:
                rest.extend(refs[index + 1 :])
                return ready, rest
        return (ready, rest) if at_most else None

    def future(self, ref: ObjectRef[Any]) -> concurrent.futures.Future[Any]:
        result: concurrent.futures.Future[Any] = concurrent.futures.Future()
        entry = self._entry(ref)

        def load() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                value = self._load(self._entry(ref), None)  # the closure keeps the ref alive
            except BaseException as error:  # noqa: BLE001 - it is the future's result
                result.set_exception(error)
            else:
                result.set_result(value)

        def ready(_entry: Entry) -> None:
            # Never in the thread that messages are handled in.
            if not self._load_soon(load, result) and result.set_running_or_notify_cancel():
                result.set_exception(MinirayError("The process ends: its futures are not read."))

        if not self.table.when_ready(entry, ready):
            self.borrowing.want([entry])
        elif not self._load_soon(load, result):
            load()
        return result

    def when_done(self, ref: ObjectRef[Any], callback: Callable[[], None]) -> None:
        entry = self._entry(ref)

        def ready(_entry: Entry) -> None:
            callback()

        if self.table.when_ready(entry, ready):
            callback()
        else:
            self.borrowing.want([entry])

    def _load_soon(self, load: Callable[[], None], result: concurrent.futures.Future[Any]) -> bool:
        """Have a future's value read in a thread; False if there are none any more, at the end.

        It may be on another node, and unpickling it runs user code: its user does not wait for it.
        """
        try:
            loading = self._future_pool().submit(load)
        except RuntimeError:
            return False
        loading.add_done_callback(lambda end: end.cancelled() and result.cancel())
        return True

    def _future_pool(self) -> concurrent.futures.ThreadPoolExecutor:
        """Threads in which values of futures are read and unpickled, which may take any time."""
        with self._lock:
            if self._futures is None:
                self._futures = concurrent.futures.ThreadPoolExecutor(
                    _FUTURE_THREADS, thread_name_prefix="miniray-future"
                )
            return self._futures

    async def value_of(self, ref: ObjectRef[Any]) -> Any:
        entry = self._entry(ref)
        while True:
            if entry.value is None:
                await self._there(entry)
            value = entry.value
            if value is None:  # it was lost meanwhile, and is made again
                continue
            if not is_shared(value):
                return self.load(entry, value)
            try:
                found = await self._map_later(entry, value)
            except ObjectLostError as error:
                self._recover(entry, value, error.reason)
            else:
                return _unpickled(found)

    async def _map_later(self, entry: Entry, value: Value) -> tuple[Mapping, Block]:
        """As ``_map``, without blocking the event loop: it may be on another node, or on disk."""
        mapping = entry.mapping
        block = None if mapping is None else mapping.block()
        if mapping is None or block is None:
            mapping, block = await self.shared_memory.map_later(value[1])
            if mapping.may_be_shared and entry.value is value:
                entry.mapping = mapping
        return mapping, block

    async def _there(self, entry: Entry) -> None:
        """Wait until an entry has a value."""
        import asyncio

        self.loop.flush_posted()
        loop = asyncio.get_running_loop()
        there: asyncio.Future[None] = loop.create_future()

        here = threading.get_ident()

        def ready(_entry: Entry) -> None:
            if self.loop.in_callback and threading.get_ident() == here:
                _resolve(there)
            else:
                loop.call_soon_threadsafe(_resolve, there)

        if not self.table.when_ready(entry, ready):
            self.borrowing.want([entry])
            try:
                await there
            finally:
                self.table.drop_waiter(entry, ready)


def _unpickled(found: tuple[Mapping, Block]) -> Any:
    """The Python value of one in shared memory."""
    mapping, block = found
    return deserialize(mapping.form, memoryview(block).cast("B"), mapped=True)


def _is_error(entry: Entry) -> bool:
    value = entry.value
    return value is not None and value[0] == p.VALUE_ERROR


def _resolve(future: Any) -> None:
    if not future.done():
        future.set_result(None)
