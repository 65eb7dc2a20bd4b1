"""put, get, wait, futures and await: the values of objects."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

from miniray.calls.calls import NOT_ATTACHED
from miniray.common.config import config
from miniray.common.names import call_site, describe
from miniray.common.object_ref import ObjectRef, hooks
from miniray.common.runtime import RuntimeObjects
from miniray.exceptions import (
    GetTimeoutError,
    MinirayError,
    ObjectLostError,
    TaskError,
)
from miniray.messages import protocol as p
from miniray.messages.value import is_error, is_shared, location_of
from miniray.objects.object_ref_generator import ObjectRefGenerator
from miniray.objects.waiting import deadline_of, time_left
from miniray.values.serialization import deserialize, serialize
from miniray.wire.interrupts import uncut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.client.ref_tracking import RefTracking
    from miniray.messages.value import Value
    from miniray.objects.objects import Entry
    from miniray.objects.shared_memory import Mapped, SharedMemory
    from miniray.objects.unseen_results import UnseenErrors
    from miniray.objects.waiting import ValueFetches, Waits
    from miniray.values.serialization import Serialized

#: Seconds in which a value that is on this node should be mapped, with any timeout.
_TO_MAP = 1.0
#: Values behind those that ``wait`` returns as ready that it has brought to this node. So few that
#: a loop which takes one value at a time stays linear.
_NEXT = 4


@dataclasses.dataclass(eq=False, repr=False)
class ObjectAccess(RuntimeObjects):
    """Values, from wherever they are."""

    _refs: RefTracking
    _shared_memory: SharedMemory
    #: How this process waits.
    _waits: Waits
    #: In which values of futures are read and unpickled, which may take any time.
    _threads: concurrent.futures.Executor
    #: Called with each error that user code gets.
    _unseen_errors: UnseenErrors
    #: Recreates a lost value, or returns why it cannot; see ``recovery.py``.
    _recover_value: Callable[[Entry, Value], str | None]
    #: For a value that was not ready within a timeout: the name of the call that makes it, and a
    #: sentence on what that waits for.
    _why_missing: Callable[[bytes, float | None], tuple[str, str]]

    def __post_init__(self) -> None:
        self._table = self._refs.table

    def put(self, value: Any) -> ObjectRef[Any]:
        if hooks.dropped:
            self._refs.drain()
        serialized = serialize(value)
        if serialized.size > self._shared_memory.plain_limit:
            return self._put_recorded(serialized)
        refs = list(serialized.refs) or None
        return self._table.create_with_value(self._table.new_id(), serialized.value(), refs)

    @uncut  # the memory would have no owner; the ref of a small value drops that by itself
    def _put_recorded(self, serialized: Serialized) -> ObjectRef[Any]:
        """Store a value and its place in user code, at a negligible cost beside a large value."""
        made = call_site()
        if serialized.size > config().inline_limit:
            table = self._table
            stored = self._shared_memory.write(
                serialized, table.process_id, table.node_id, describe(made)
            )
        else:
            stored = serialized.value()
        refs = list(serialized.refs) or None
        ref = self._table.create_with_value(self._table.new_id(), stored, refs)
        return self._table.record(ref, made)

    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        if hooks.dropped:
            self._refs.drain()
        deadline = deadline_of(timeout)
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
            if type(error) is not GetTimeoutError:  # which does not show what they will be
                for entry in entries:  # one error stands for all that is wrong with them
                    entry.seen = True
            raise

    def _load_all(self, entries: Sequence[Entry], deadline: float | None) -> list[Any]:
        # All of them begin to move while the first is waited for.
        mapped = self._shared_memory.mapped
        shared = [
            value
            for entry in entries
            if (value := entry.value) is not None
            and is_shared(value)
            and mapped(location_of(value)) is None
        ]
        ahead = self._shared_memory.fetches.prefetch(shared) if shared else ()
        try:
            return [self._load(entry, deadline) for entry in entries]
        finally:
            if ahead:
                self._shared_memory.fetches.withdraw(ahead)

    def _wait_for_all(
        self,
        entries: Sequence[Entry],
        pending: Sequence[Entry],
        timeout: float | None,
        deadline: float | None,
    ) -> None:
        """Wait until all entries have values; raise as soon as one has failed.

        The others may wait for that one, as processes of a group do in a collective operation,
        and never end.
        """
        failed = [] if len(pending) == len(entries) else [e for e in entries if is_error(e.value)]
        if not failed and not self._waits.for_values(pending, len(pending), timeout, failed=failed):
            missing = [entry for entry in pending if entry.value is None]
            first = (missing or pending)[0].id
            call, why = self._why_missing(first, timeout)
            assert timeout is not None
            count = len(missing), len(entries)
            raise GetTimeoutError.of(first.hex(), call, *count, timeout, why)
        if failed:
            self._load(failed[0], deadline)

    def _load(self, entry: Entry, deadline: float | None) -> Any:
        """Read the value of an entry; have it made again, if that is possible, when it is lost."""
        while True:
            value = entry.value
            if value is not None:
                if not is_shared(value):
                    return self._read(entry, value)
                try:
                    found = self._map(entry, value, deadline)
                except ObjectLostError as error:
                    self._recover(entry, value, error.reason)
                else:  # what unpickling raises is not about this value: another one may be lost
                    return _unpickled(found)
            if not self._waits.for_values([entry], 1, time_left(deadline)):
                raise GetTimeoutError(
                    f"The value of {entry.id.hex()} was lost, and not made again in time."
                )

    def _map(self, entry: Entry, value: Value, deadline: float | None) -> Mapped:
        """Map the shared memory of a value; raise GetTimeoutError if it is not here in time."""
        location = location_of(value)
        known = self._shared_memory.mapped(location)
        if known is not None:
            return known
        left = None if deadline is None else self._time_to_map(entry, value, deadline)
        try:
            return self._shared_memory.map(location, left)
        except TimeoutError:
            raise GetTimeoutError(
                f"The value of {entry.id.hex()} is on another node, or on disk, and was not "
                f"here in time."
            ) from None

    def _time_to_map(self, entry: Entry, value: Value, deadline: float) -> float:
        """Return how many seconds mapping may take; above 0 for values on this node."""
        left = time_left(deadline) or 0.0
        fetches = self._shared_memory.fetches
        if not left and fetches.is_remote(value):
            fetches.look([entry])
            if not fetches.is_here(entry):
                return left
        return max(left, _TO_MAP)

    def _recover(self, entry: Entry, value: Value, why: str) -> None:
        """Recover a value that could not be loaded; raise ObjectLostError if that is impossible."""
        reason = self._recover_value(entry, value)
        if reason is not None:
            raise ObjectLostError(entry.id.hex(), f"{why}; {reason}") from None

    def _entry(self, ref: ObjectRef[Any]) -> Entry:
        entry = self._table.entry(ref.binary())
        if entry is None:
            raise ObjectLostError(ref.hex(), NOT_ATTACHED)
        return entry

    def _read(self, entry: Entry, value: Value) -> Any:
        """Read a value that is in this process; raise it if it is an error."""
        form, payload, _ = value
        if form == p.VALUE_PICKLE:
            return pickle.loads(payload)
        if form == p.VALUE_ERROR:
            entry.seen = True
            raise self._error_of(payload)
        return deserialize(form, payload)

    def _error_of(self, pickled: bytes) -> BaseException:
        """Return what an error value raises.

        Made here and not where it is raised: a frame that is in its traceback and has it in a
        variable would be a cycle, which holds the caller's refs until the next garbage collection.
        """
        error: BaseException = pickle.loads(pickled)
        self._unseen_errors.raised(error)
        return error.as_instanceof_cause() if isinstance(error, TaskError) else error

    def wait(
        self,
        refs: Sequence[ObjectRef[Any]],
        *,
        num_returns: int,
        timeout: float | None,
        fetch_local: bool,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        if hooks.dropped:
            self._refs.drain()
        fetches = self._shared_memory.fetches if fetch_local else None
        streams = False
        try:
            found = self._split(refs, num_returns, fetches)
        except AttributeError:
            streams = any(isinstance(ref, ObjectRefGenerator) for ref in refs)
            if not streams:
                raise
        if streams:  # out of the handler, whose error would be chained to one of the wait
            return self._wait_streams(refs, num_returns, timeout, fetch_local)
        if found is None:
            pending = self._pending(refs, fetches)
            if fetches is not None and timeout == 0:
                fetches.look(pending)
                pending = self._pending(refs, fetches)
            needed = num_returns - (len(refs) - len(pending))
            if needed > 0:
                self._waits.for_values(pending, needed, timeout, fetches)
            found = self._split(refs, num_returns, fetches, at_most=True)
            assert found is not None
        elif fetches is not None:
            _, rest = found
            for ref in rest[:_NEXT]:  # those that are taken next: bring them here meanwhile
                entry = self._table.entry(ref._id)
                if entry is not None and entry.value is not None:
                    fetches.bring(entry, entry.value)
        return found

    def _pending(self, refs: Sequence[ObjectRef[Any]], fetches: ValueFetches | None) -> list[Entry]:
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
        """Do as ``wait`` with generators among the refs: they are ready when they have an item."""
        given = {
            (ref._next_ref() if isinstance(ref, ObjectRefGenerator) else ref): ref for ref in refs
        }
        ready, rest = self.wait(
            list(given), num_returns=num_returns, timeout=timeout, fetch_local=fetch_local
        )
        return [given[ref] for ref in ready], [given[ref] for ref in rest]

    def _split(
        self,
        refs: Sequence[ObjectRef[Any]],
        wanted: int,
        fetches: ValueFetches | None,
        *,
        at_most: bool = False,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]] | None:
        """Return the first ``wanted`` ready refs and the rest; None if there are fewer.

        Stops looking when it has enough, so that a loop that takes one at a time
        does not look at all of them each time.
        """
        ready: list[ObjectRef[Any]] = []
        rest: list[ObjectRef[Any]] = []
        find = self._table.entry
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

        if self._waits.when_ready(entry, ready) and not self._load_soon(load, result):
            load()
        return result

    def when_done(self, ref: ObjectRef[Any], callback: Callable[[], None]) -> None:
        entry = self._entry(ref)

        def ready(_entry: Entry) -> None:
            callback()

        if self._waits.when_ready(entry, ready):
            callback()

    def _load_soon(self, load: Callable[[], None], result: concurrent.futures.Future[Any]) -> bool:
        """Read a future's value in a thread; False if there are no threads any more, at the end.

        It may be on another node, and unpickling it runs user code: its user does not wait for it.
        """
        try:
            loading = self._threads.submit(load)
        except RuntimeError:
            return False
        loading.add_done_callback(lambda end: end.cancelled() and result.cancel())
        return True

    async def value_of(self, ref: ObjectRef[Any]) -> Any:
        entry = self._entry(ref)
        while True:
            if entry.value is None:
                await self._waits.for_value(entry)
            value = entry.value
            if value is None:  # it was lost meanwhile, and is made again
                continue
            if not is_shared(value):
                return self._read(entry, value)
            try:
                # Without blocking the event loop: it may be on another node, or on disk.
                found = await self._shared_memory.map_later(location_of(value))
            except ObjectLostError as error:
                self._recover(entry, value, error.reason)
            else:
                return _unpickled(found)


def _unpickled(found: Mapped) -> Any:
    form, block = found
    return deserialize(form, memoryview(block).cast("B"), mapped=True)
