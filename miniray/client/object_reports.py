"""What this process reports of its objects when its daemon asks: `miniray memory` shows it."""

from __future__ import annotations

import heapq
import operator
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from miniray.calls.call import Call
from miniray.common.ids import owner_of
from miniray.common.names import describe
from miniray.common.state_types import order
from miniray.messages import protocol as p
from miniray.objects.holds import Holds, is_shared, object_row, order_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from miniray.calls.call import Origin
    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.common.names import CallSite
    from miniray.common.object_ref import ObjectRef
    from miniray.common.state_types import Hold, ObjectRow, ObjectsHeld
    from miniray.objects.objects import Entry, Value


class _Arguments(NamedTuple):
    """Large arguments: they are in shared memory too, though they are no object."""

    call: Call | Origin
    value: Value


class ObjectReports:
    """Answers the daemon."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        executing: Callable[[], Iterable[tuple[str, Iterable[ObjectRef[Any]]]]] = tuple,
    ) -> None:
        """Begin to answer.

        Args:
            runtime: Of this process.
            executing: In a worker: gives the calls that run there, and the refs that they hold.
        """
        self._runtime = runtime
        self._executing = executing

    def on_asked(self, number: int, limit: int, detail: bool, deadline: float) -> None:
        """Answer the daemon, in a thread: there may be millions of objects.

        Args:
            number: Of the question.
            limit: How many objects are told one by one: the largest.
            detail: Whether small ones, and those that are still to come, are among them.
            deadline: When nobody waits for the answer any more, on the clock of this machine.
        """
        if time.monotonic() > deadline:
            return
        self._runtime.drain()
        look = _Look(self._runtime, self._executing(), detail)

        def answer() -> None:
            held = look.report(limit)
            if time.monotonic() <= deadline:
                self._runtime.link.node_notice("objects_held", number, held)

        threading.Thread(target=answer, name="miniray-memory-report", daemon=True).start()


class _Look:
    """The objects and calls of a process at one moment.

    Other threads go on meanwhile: what they may replace is read once.
    """

    def __init__(
        self,
        runtime: ClusterRuntime,
        executing: Iterable[tuple[str, Iterable[ObjectRef[Any]]]],
        detail: bool,
    ) -> None:
        self._table = runtime.table
        self._actors = runtime.actors
        self._detail = detail
        self._entries = runtime.table.snapshot()
        calls = [*runtime.calls.open.values(), *runtime.actors.creations()]
        self._calls = {call.number: call for call in calls}
        self._origins = runtime.calls.lineage.pinning()
        self._executing = list(executing)
        #: Small values that this process owns, and their bytes.
        self._inline = self._inline_bytes = 0

    def report(self, limit: int) -> ObjectsHeld:
        """Count all objects and describe the largest."""
        first = heapq.nsmallest(limit, self._placed(), key=operator.itemgetter(0))
        chosen = [item for _, item in first]
        holds = self._holds([item.id for item in chosen if not isinstance(item, _Arguments)])
        makers = {id: call for call in self._calls.values() for id in call.return_ids}
        rows = [
            self._arguments_row(item)
            if isinstance(item, _Arguments)
            else self._row(item, holds, makers)
            for item in chosen
        ]
        return {"inline": self._inline, "inline_bytes": self._inline_bytes, "objects": rows}

    def _placed(self) -> Iterator[tuple[tuple[int, int, bytes], Entry | _Arguments]]:
        """Count the small objects; yield what may be listed, with its place among others."""
        own, detail = self._table.process_id, self._detail
        for entry in self._entries:
            value = entry.value
            if value is not None and value[0] != p.VALUE_SHARED and entry.id.startswith(own):
                size = len(value[1])  # of small values there may be millions
                self._inline += 1
                self._inline_bytes += size
                if detail:
                    yield order(size, 0, entry.id), entry
            elif detail or self._is_large(entry.id, value):
                yield order_of(value, entry.id), entry
        calls: list[Call | Origin] = [*self._origins, *self._calls.values()]
        arguments = [_Arguments(call, call.arguments) for call in calls]
        # A call that runs again has those of its origin.
        for each in {each.value[1]: each for each in arguments if is_shared(each.value)}.values():
            yield order_of(each.value, b""), each

    def _is_large(self, id: bytes, value: Value | None) -> bool:
        """Whether a value is in shared memory; of one not read yet only its owner knows."""
        if value is not None:
            return is_shared(value)
        return not (self._table.is_owned(id) or self._is_actor(id))

    def _holds(self, ids: list[bytes]) -> Holds:
        """Find out what holds these objects."""
        holds = Holds(ids)
        for call in self._calls.values():
            holds.see("USED_BY_PENDING_TASK", call.name, call.pins or ())
        for origin in self._origins:
            holds.see("USED_BY_PENDING_TASK", _again(origin), origin.pins)
        for name, refs in self._executing:
            holds.see("USED_BY_PENDING_TASK", name, refs)
        for entry in self._entries:
            if contained := entry.contained:
                holds.see("CAPTURED_IN_OBJECT", entry.id.hex(), contained)
        return holds

    def _is_actor(self, id: bytes) -> bool:
        return self._table.is_actor(id) or self._actors.knows(id)

    def _row(self, entry: Entry, holds: Holds, makers: dict[bytes, Call]) -> ObjectRow:
        value = entry.value
        maker = makers.get(entry.id) if value is None else None
        made = getattr(entry, "made", None)
        reasons = holds.of(entry, self._table.pickled.get(entry.id, 0))
        if self._is_actor(entry.id):
            reasons = [{"kind": "ACTOR_HANDLE", "count": max(1, entry.local), "names": []}]
        return object_row(
            entry.id,
            owner_of(entry.id),
            self._table.process_id,
            value,
            status=_status(value, made, maker),
            call_site=maker.name if maker is not None else describe(made),
            holds=reasons,
            borrowers=[who for who, count in dict(entry.borrowers or {}).items() if count > 0],
        )

    def _arguments_row(self, arguments: _Arguments) -> ObjectRow:
        call = arguments.call
        name = call.name if isinstance(call, Call) else _again(call)
        hold: Hold = {"kind": "USED_BY_PENDING_TASK", "count": 1, "names": [name]}
        return object_row(
            b"",
            self._table.process_id,
            self._table.process_id,
            arguments.value,
            status=_status_of(call) if isinstance(call, Call) else "FINISHED",
            call_site=f"arguments of {call.name}",
            holds=[hold],
            borrowers=[],
        )


def _status(value: Value | None, made: CallSite | None, maker: Call | None) -> str:
    """Ray's word for the state of the task that makes an object."""
    if maker is not None:
        return _status_of(maker)
    if value is not None and value[0] == p.VALUE_ERROR:
        return "FAILED"
    return "FINISHED" if isinstance(made, str) else "NIL"


def _again(origin: Origin) -> str:
    """For whom arguments are held that a task which has ended may need again."""
    return f"{origin.name}, to run again should its result be lost,"


def _status_of(call: Call) -> str:
    if call.waiting:
        return "PENDING_ARGS_AVAIL"
    return "PENDING_NODE_ASSIGNMENT" if call.peer is None else "SUBMITTED_TO_WORKER"
