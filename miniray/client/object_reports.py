"""What this process tells of its objects when its daemon asks: `miniray memory` shows it.

A process may have millions of objects, so the work is done in slices between which the I/O
thread does everything else, and only the largest are told one by one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from miniray.calls.call import Call, Origin
from miniray.common.call_site import describe
from miniray.common.first import First
from miniray.common.ids import owner_of
from miniray.common.memory_types import order
from miniray.messages import protocol as p
from miniray.objects.holds import Holds

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from typing import Any

    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.common.memory_types import Hold, ObjectRow, ObjectsHeld, ProcessTotals
    from miniray.common.object_ref import ObjectRef
    from miniray.objects.objects import Entry, Value

T = TypeVar("T")

#: Objects or calls that are looked at in one go, for which a millisecond is enough; and objects
#: of which only those are looked at that contain others.
_SLICE, _LARGE_SLICE = 2_000, 20_000


def _nothing() -> Iterable[tuple[str, Iterable[ObjectRef[Any]]]]:
    return ()


class ObjectReports:
    """Answers the daemon. Used in the I/O thread only."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        executing: Callable[[], Iterable[tuple[str, Iterable[ObjectRef[Any]]]]] = _nothing,
    ) -> None:
        """Begin to answer.

        Args:
            runtime: Of this process.
            executing: In a worker: gives the calls that run there, and the refs that they hold.
        """
        self._runtime = runtime
        self._executing = executing

    def on_asked(self, number: int, limit: int, detail: bool, deadline: float) -> None:
        """The daemon asks.

        Args:
            number: Of the question.
            limit: How many objects are told one by one.
            detail: Whether small ones, and those that are still to come, are among them.
            deadline: When nobody waits for the answer any more, on the clock of this machine.
        """
        steps = self.steps(limit, detail)

        def step() -> None:
            began = time.monotonic()
            answer = next(steps) if began <= deadline else None
            if answer is None and began <= deadline:
                # Others have the thread for as long as this had it.
                self._runtime.loop.call_later(time.monotonic() - began, step)
                return
            steps.close()  # what was looked at is held no longer than the look takes
            if answer is not None:
                self._runtime.link.node_notice("objects_held", number, answer)

        step()

    def steps(self, limit: int, detail: bool) -> Generator[ObjectsHeld | None, None, None]:
        """The answer, after as many times None as it takes slices."""
        runtime = self._runtime
        runtime.drain()
        found = _Objects(runtime, limit, detail)
        entries = runtime.table.snapshot()
        for part in _slices(entries, _SLICE):
            found.add_entries(part)
            yield None
        open_calls = [*runtime.calls.open.values(), *runtime.actors.creations()]
        calls = list({call.number: call for call in open_calls}.values())
        origins = runtime.calls.lineage.pinning()
        found.add_arguments([*calls, *(each for each in origins if each.has_large_arguments)])
        found.choose()
        for some in _slices(calls, _SLICE):
            found.see_calls(some)
            yield None
        for some_origins in _slices(origins, _SLICE):
            for origin in some_origins:
                found.holds.see("USED_BY_PENDING_TASK", _again(origin), origin.pins)
            yield None
        for name, refs in self._executing():
            found.holds.see("USED_BY_PENDING_TASK", name, refs)
        for part in _slices(entries, _LARGE_SLICE):
            for entry in part:
                if entry.contained:
                    found.holds.see("CAPTURED_IN_OBJECT", entry.id.hex(), entry.contained)
            yield None
        yield {"totals": found.totals, "objects": found.rows()}


class _Objects:
    """The objects of a process on the way into a report."""

    def __init__(self, runtime: ClusterRuntime, limit: int, detail: bool) -> None:
        self._table = runtime.table
        self._actors = runtime.actors
        self._detail = detail
        self._largest: First[Entry | Call | Origin] = First(limit)
        self._chosen: list[Entry | Call | Origin] = []
        #: Calls by the objects that they make.
        self._makers: dict[bytes, Call] = {}
        self.holds = Holds(())
        self.totals: ProcessTotals = {
            "shared": 0,
            "shared_bytes": 0,
            "inline": 0,
            "inline_bytes": 0,
            "pending": 0,
            "borrowed": 0,
        }

    def add_entries(self, entries: Iterable[Entry]) -> None:
        """Count objects, and keep the largest."""
        own, detail, totals = self._table.process_id, self._detail, self.totals
        largest = self._largest
        for entry in entries:
            value = entry.value
            if value is None or value[0] == p.VALUE_SHARED or not entry.id.startswith(own):
                self._add(entry, value)
            else:  # of small values there may be millions
                size = len(value[1])
                totals["inline"] += 1
                totals["inline_bytes"] += size
                if detail:
                    largest.add(order(size, 0, entry.id), entry)

    def _add(self, entry: Entry, value: Value | None) -> None:
        listed = self._detail
        if not self._is_actor(entry.id):
            owned = self._table.is_owned(entry.id)
            self._count(value, owned=owned)
            # What was borrowed and not read may be in shared memory: only its owner knows.
            listed |= _is_shared(value) or not (owned or value)
        if listed:
            self._largest.add(_order(value, entry.id), entry)

    def add_arguments(self, calls: Iterable[Call | Origin]) -> None:
        """Large arguments of calls are in shared memory too, though they are no objects."""
        seen = set()  # one that is remembered may be running
        for call in calls:
            if _is_shared(call.arguments) and call.arguments[1] not in seen:
                seen.add(call.arguments[1])
                self._count(call.arguments, owned=True)
                self._largest.add(_order(call.arguments, b""), call)

    def choose(self) -> None:
        """All are there: only of the largest is it told why they are held."""
        self._chosen = self._largest.items()
        self.holds = Holds(
            [item.id for item in self._chosen if not isinstance(item, (Call, Origin))]
        )

    def see_calls(self, calls: Iterable[Call]) -> None:
        """What calls in flight, and constructors that may run again, hold and make."""
        for call in calls:
            self.holds.see("USED_BY_PENDING_TASK", call.name, call.pins or ())
            self._makers.update(dict.fromkeys(call.return_ids, call))

    def rows(self) -> list[ObjectRow]:
        """The chosen ones."""
        return [
            self._arguments_row(item) if isinstance(item, (Call, Origin)) else self._row(item)
            for item in self._chosen
        ]

    def _count(self, value: Value | None, *, owned: bool) -> None:
        totals = self.totals
        if not owned:
            totals["borrowed"] += 1
        elif value is None:
            totals["pending"] += 1
        elif _is_shared(value):
            totals["shared"] += 1
            totals["shared_bytes"] += _size_of(value)
        else:
            totals["inline"] += 1
            totals["inline_bytes"] += _size_of(value)

    def _is_actor(self, id: bytes) -> bool:
        return self._table.is_actor(id) or self._actors.knows(id)

    def _row(self, entry: Entry) -> ObjectRow:
        maker = self._makers.get(entry.id) if entry.value is None else None
        holds = self.holds.of(entry, self._table.pickled.get(entry.id, 0))
        if self._is_actor(entry.id):
            holds = [{"kind": "ACTOR_HANDLE", "count": max(1, entry.local), "names": []}]
        return self._any_row(
            entry.id,
            owner_of(entry.id),
            entry.value,
            status=_status(entry, maker),
            call_site=maker.name if maker is not None else describe(getattr(entry, "made", None)),
            holds=holds,
            borrowers=[who for who, count in dict(entry.borrowers or {}).items() if count > 0],
        )

    def _arguments_row(self, call: Call | Origin) -> ObjectRow:
        name = call.name if isinstance(call, Call) else _again(call)
        hold: Hold = {"kind": "USED_BY_PENDING_TASK", "count": 1, "names": [name]}
        return self._any_row(
            b"",
            self._table.process_id,
            call.arguments,
            status=_status_of(call) if isinstance(call, Call) else "FINISHED",
            call_site=f"arguments of {call.name}",
            holds=[hold],
            borrowers=[],
        )

    def _any_row(
        self,
        id: bytes,
        owner: bytes,
        value: Value | None,
        *,
        status: str,
        call_site: str,
        holds: list[Hold],
        borrowers: list[bytes],
    ) -> ObjectRow:
        node, segment = b"", 0
        if value is not None and value[0] == p.VALUE_SHARED:
            node, segment, _size = value[1]
        return {
            "id": id,
            "owner": owner,
            "process": self._table.process_id,
            "size": _size_of(value),
            "node": node,
            "segment": segment,
            "status": status,
            "call_site": call_site,
            "holds": holds,
            "borrowers": borrowers,
        }


def _is_shared(value: Value | None) -> bool:
    return value is not None and value[0] == p.VALUE_SHARED


def _order(value: Value | None, id: bytes) -> tuple[int, int, bytes]:
    if value is not None and value[0] == p.VALUE_SHARED:
        node, segment, size = value[1]
        return order(size, segment, node)
    return order(_size_of(value), 0, id)


def _size_of(value: Value | None) -> int:
    if value is None:
        return 0
    return value[1][2] if value[0] == p.VALUE_SHARED else len(value[1])


def _status(entry: Entry, maker: Call | None) -> str:
    """Ray's word for the state of the task that makes an object."""
    if maker is not None:
        return _status_of(maker)
    if entry.value is not None and entry.value[0] == p.VALUE_ERROR:
        return "FAILED"
    return "FINISHED" if isinstance(getattr(entry, "made", None), str) else "NIL"


def _again(origin: Origin) -> str:
    """For whom arguments are held that a task which has ended may need again."""
    return f"{origin.name}, to run again should its result be lost,"


def _status_of(call: Call) -> str:
    if call.waiting:
        return "PENDING_ARGS_AVAIL"
    return "PENDING_NODE_ASSIGNMENT" if call.peer is None else "SUBMITTED_TO_WORKER"


def _slices(items: list[T], size: int) -> Iterator[Iterable[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
