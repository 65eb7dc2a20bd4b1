"""What this process reports of its objects when its daemon asks: `miniray memory` shows it.

A ref is one Python object: user code, a call in flight and a value that contains it may all hold
the same one. A ref that a call or a value is seen to hold is counted as theirs alone.
"""

from __future__ import annotations

import dataclasses
import heapq
import operator
from typing import TYPE_CHECKING, NamedTuple

from miniray.calls.call import Call
from miniray.common.names import describe
from miniray.common.object_ref import owner_of
from miniray.common.state_types import PICKLED, order
from miniray.messages.value import is_error, is_shared, location_of, place_of, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from typing import Any

    from miniray.calls.call import Origin
    from miniray.calls.calls import CallTable
    from miniray.client.actor_clients import ActorClients
    from miniray.client.ref_tracking import RefTracking
    from miniray.common.names import CallSite
    from miniray.common.object_ref import ObjectRef
    from miniray.common.state_types import Hold, ObjectRow, ObjectsHeld, ReferenceType
    from miniray.messages.value import Value
    from miniray.objects.objects import Entry, ObjectTable


#: Names that are listed for one reason.
_MAX_NAMES = 3


class _Arguments(NamedTuple):
    """Large arguments: they are in shared memory too, though they are no object."""

    call: Call | Origin
    value: Value


class Holds:
    """What holds the objects of these ids in this process."""

    def __init__(self, ids: Collection[bytes]) -> None:
        self._reasons: dict[bytes, dict[ReferenceType, Hold]] = {id: {} for id in ids}
        #: By object: which refs something was seen to hold.
        self._seen: dict[bytes, set[int]] = {id: set() for id in ids}

    def see(self, kind: ReferenceType, name: str, refs: Iterable[ObjectRef[Any]]) -> None:
        """Note that something holds these refs.

        Args:
            kind: Call or value, in Ray's words.
            name: Of the call, or the id of the value.
            refs: What it holds.
        """
        for ref in refs:
            reasons = self._reasons.get(ref.binary())
            if reasons is None:
                continue
            self._seen[ref.binary()].add(id(ref))
            reason = reasons.setdefault(kind, {"kind": kind, "count": 0, "names": []})
            reason["count"] += 1
            if name not in reason["names"] and len(reason["names"]) < _MAX_NAMES:
                reason["names"].append(name)

    def of(self, entry: Entry, pickled: int) -> list[Hold]:
        """Return all reasons for an object; refs that nothing was seen to hold are user code's.

        Args:
            entry: Of the object.
            pickled: How many copies of its refs were pickled by the user.
        """
        local = entry.local - pickled - len(self._seen[entry.id])
        holds: list[Hold] = []
        if local > 0:
            holds.append({"kind": "LOCAL_REFERENCE", "count": local, "names": []})
        if pickled:
            holds.append({"kind": "LOCAL_REFERENCE", "count": pickled, "names": [PICKLED]})
        return [*holds, *self._reasons[entry.id].values()]


@dataclasses.dataclass(eq=False, repr=False)
class ObjectReports:
    """Answers the daemon."""

    #: Of this process.
    refs: RefTracking
    #: Its calls.
    calls: CallTable
    #: Those that it made or has called.
    actors: ActorClients
    #: Gives the calls that run here, and the refs that they hold.
    executing: Callable[[], Iterable[tuple[str, Iterable[ObjectRef[Any]]]]]

    def held(self, limit: int, detail: bool) -> Callable[[], ObjectsHeld]:
        """Return what makes the report, for a thread: there may be millions of objects.

        Args:
            limit: How many objects are told one by one: the largest.
            detail: Whether small ones, and those that are still to come, are among them.
        """
        self.refs.drain()
        look = _Look(self.refs.table, self.calls, self.actors, list(self.executing()), detail)
        return lambda: look.report(limit)


@dataclasses.dataclass(eq=False, repr=False)
class _Look:
    """The objects and calls of a process at one moment.

    Other threads go on meanwhile: what they may replace is read once.
    """

    _table: ObjectTable
    calls: dataclasses.InitVar[CallTable]
    _actors: ActorClients
    _executing: Iterable[tuple[str, Iterable[ObjectRef[Any]]]]
    _detail: bool

    def __post_init__(self, calls: CallTable) -> None:
        self._entries = self._table.snapshot()
        here = [*list(calls.open.values()), *self._actors.creations()]
        self._calls = {call.number: call for call in here}
        self._origins = calls.lineage.pinning()
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
            if value is not None and not is_shared(value) and entry.id.startswith(own):
                size = size_of(value)
                self._inline += 1
                self._inline_bytes += size
                if detail:
                    yield order(size, 0, entry.id), entry
            elif detail or self._is_large(entry.id, value):
                yield _order_of(value, entry.id), entry
        calls: list[Call | Origin] = [*self._origins, *self._calls.values()]
        arguments = [_Arguments(call, call.arguments) for call in calls]
        # A call that runs again has those of its origin.
        large = {location_of(each.value): each for each in arguments if is_shared(each.value)}
        for each in large.values():
            yield _order_of(each.value, b""), each

    def _is_large(self, id: bytes, value: Value | None) -> bool:
        """Return whether a value may be in shared memory: of one not read, only its owner knows."""
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
        borrowers = [who for who, count in dict(entry.borrowers or {}).items() if count > 0]
        call_site = maker.name if maker is not None else describe(made)
        status = _status(value, made, maker)
        return self._told(entry.id, value, status, call_site, reasons, borrowers)

    def _arguments_row(self, arguments: _Arguments) -> ObjectRow:
        call = arguments.call
        name = call.name if isinstance(call, Call) else _again(call)
        hold: Hold = {"kind": "USED_BY_PENDING_TASK", "count": 1, "names": [name]}
        status = call.status if isinstance(call, Call) else "FINISHED"
        return self._told(b"", arguments.value, status, f"arguments of {call.name}", [hold], [])

    def _told(
        self,
        id: bytes,
        value: Value | None,
        status: str,
        call_site: str,
        holds: list[Hold],
        borrowers: list[bytes],
    ) -> ObjectRow:
        own = self._table.process_id
        node, segment, size = place_of(value)
        return {
            "id": id,
            "owner": owner_of(id) or own,
            "process": own,
            "size": size,
            "node": node,
            "segment": segment,
            "status": status,
            "call_site": call_site,
            "holds": holds,
            "borrowers": borrowers,
        }


def _status(value: Value | None, made: CallSite | None, maker: Call | None) -> str:
    """Return Ray's word for the state of the task that makes an object."""
    if maker is not None:
        return maker.status
    if is_error(value):
        return "FAILED"
    return "FINISHED" if isinstance(made, str) else "NIL"


def _again(origin: Origin) -> str:
    """Name the holder of arguments that a task which has ended may need again."""
    return f"{origin.name}, to run again should its result be lost,"


def _order_of(value: Value | None, id: bytes) -> tuple[int, int, bytes]:
    node, segment, size = place_of(value)
    return order(size, segment, node or id)
