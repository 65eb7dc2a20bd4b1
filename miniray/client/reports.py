"""Reports of this process, on request of its daemon: its calls, objects and metrics.

Nothing is recorded for it: open calls and objects are in their tables, and what a call waits for is
read from the frames of threads and coroutines on request. `miniray list tasks`, `why`
and `memory` show it.

A ref is one Python object: user code, a call in flight and a value that contains it may all hold
the same one. A ref that a call or a value is seen to hold is counted as theirs alone.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import operator
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.calls.actor_client import ActorClient
from miniray.calls.call import Call
from miniray.calls.task_groups import TaskGroup
from miniray.common.names import describe, short_name
from miniray.common.object_ref import call_id, owner_of
from miniray.common.series import COUNTED, SECONDS, Series, how_many
from miniray.common.state_types import PICKLED, order
from miniray.messages.value import is_error, is_shared, location_of, place_of, size_of
from miniray.objects.waiting import Waits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from miniray.calls.call import Origin
    from miniray.calls.calls import CallTable
    from miniray.client.actor_clients import ActorClients
    from miniray.client.ref_tracking import RefTracking
    from miniray.common.names import CallSite
    from miniray.common.object_ref import ObjectRef
    from miniray.common.series import Row, Tags
    from miniray.common.state_types import Hold, ObjectRow, ObjectsHeld, ReferenceType
    from miniray.messages.value import Value
    from miniray.objects.objects import Entry, ObjectTable
    from miniray.wire.node_link import NodeLink

#: Frames of a stack, ids of a wait, and threads and coroutines in a report, at most.
_MAX_FRAMES, _MAX_IDS, _MAX_THREADS = 100, 1000, 2000
#: By the code of a function that waits for values: the local variable that has them.
_WAITS = {
    getattr(function, "__wrapped__", function).__code__: local
    for function, local in ((Waits.for_values, "pending"), (Waits.for_value, "entry"))
}
#: Names that are listed for one reason.
_MAX_NAMES = 3


class Answers:
    """The questions that this process can answer."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        #: By name: functions of the question's arguments, which run in the I/O thread. One that
        #: has much to look at returns a function, which a thread of its own runs for the answer.
        self.by_name: dict[str, Callable[..., Any]] = {"metrics": self.metrics}

    def metrics(self) -> list[tuple[Any, ...]]:
        """Return the series of all answers whose names begin with "metrics of "."""
        known = list(self.by_name.items())
        return [row for name, rows in known if name.startswith("metrics of ") for row in rows()]

    def on_asked(self, number: int, what: str, arguments: tuple[Any, ...], deadline: float) -> None:
        """Answer the daemon.

        Args:
            number: Of the request.
            what: Its name.
            arguments: For the function that answers it.
            deadline: When the requester stops waiting, on the clock of this machine.
        """
        if time.monotonic() > deadline:
            return
        handler = self.by_name.get(what)
        if handler is None:
            self._tell(number, None, f"this process has no answer to {what!r}")
            return
        answer, missing = _result(handler, *arguments)
        if not callable(answer):
            self._tell(number, answer, missing)
            return

        def run() -> None:
            told = _result(answer)
            if time.monotonic() <= deadline:
                self._tell(number, *told)

        threading.Thread(target=run, name="miniray-answer", daemon=True).start()

    def _tell(self, number: int, answer: Any, missing: str) -> None:
        self._link.node_notice("answer", number, (answer, missing))


def _result(handler: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    try:
        return handler(*arguments), ""
    except Exception as error:  # noqa: BLE001 - it is the answer
        return None, f"{type(error).__name__}: {error}"


# --- calls -------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, repr=False)
class CallReports:
    """Answers the daemon."""

    #: Objects and calls of this process.
    table: ObjectTable
    calls: CallTable
    #: Actors that this process made or has called.
    actors: ActorClients
    #: As ``ProcessHooks.works``.
    works: Callable[[], Iterable[tuple[bytes, str, float | None]]]

    def told(self, limit: int, detail: bool) -> Callable[[], dict[str, Any]]:
        """Return what makes the report, for a thread: there may be a million calls.

        Args:
            limit: How many calls are listed one by one: the oldest.
            detail: Whether to add what threads and coroutines do.
        """
        open_calls = [*list(self.calls.open.values()), *self.actors.creations()]
        works = list(self.works())
        threads = list(_threads()) if detail else []
        return lambda: self._report(open_calls, works, threads, limit)

    def metrics(self) -> list[Row]:
        """Return how many calls have ended and how long they took, as rows (common/series.py).

        Includes all other counts of this process.
        """
        found = Series()
        found.add(COUNTED.rows())
        for kind, ended in self.calls.ended.by_kind.items():
            for outcome, by_name in zip(("finished", "failed"), ended, strict=True):
                for name, times in [*by_name.items()]:
                    ends, lasts, tags = _ended_metrics(kind, short_name(name))
                    found.count(ends, (*tags, ("outcome", outcome)), how_many(times))
                    if kind == "ACTOR_TASK":
                        found.count("actor_busy_seconds_total", tags[:1], times[-1])
                    if outcome == "finished":
                        found.add([("histogram", lasts, "", SECONDS, tags, times)])
        return found.rows()

    def _report(
        self,
        open_calls: list[Call],
        works: list[tuple[bytes, str, float | None]],
        threads: list[dict[str, Any]],
        limit: int,
    ) -> dict[str, Any]:
        states: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for call in open_calls:
            states[_kind(call), call.name, call.status] += 1
        works.sort(key=lambda work: work[2] is None)  # those that run first
        by_name: dict[str, tuple[int, float]] = {}
        for _, name, seconds in works:
            if seconds is not None:
                count, longest = by_name.get(name, (0, 0.0))
                by_name[name] = count + 1, max(longest, seconds)
        return {
            "calls": [self._row(call) for call in open_calls[:limit]],
            "states": [(*key, count) for key, count in states.items()],
            "ended": self.calls.ended.told(),
            #: Id, name, and for how many seconds it runs; None: it is queued.
            "works": works[:limit],
            #: By name, how many run, and for how long the longest of them.
            "running_by_name": by_name,
            "num_queued": sum(seconds is None for *_, seconds in works),
            "threads": threads,
            "datasets": _datasets(),
        }

    def _row(self, call: Call) -> dict[str, Any]:
        peer, channel = call.peer, call.channel
        own = call_id(self.table.process_id, call.number)
        return {
            "task_id": call.return_ids[0] if call.return_ids else own,
            "makes": call.cancel_ids,
            "name": call.name,
            "type": _kind(call),
            "state": call.status,
            "actor_id": channel.actor_id if isinstance(channel, ActorClient) else b"",
            "node": peer.node_id if peer is not None else b"",
            "process": peer.process_id if peer is not None else b"",
            "needs": self._missing(call),
            "attempt": call.tries - 1,
        }

    def _missing(self, call: Call) -> list[bytes]:
        """Return the ids of a call's refs that have no value yet."""
        ids = [id for _, id, _, value in call.refs if value is None]
        entries = ((id, self.table.entry(id)) for id in ids[:_MAX_IDS])
        return [id for id, entry in entries if entry is not None and entry.value is None]


def _datasets() -> list[dict[str, Any]]:
    """Return what the datasets do that this process executes, if it has any."""
    stats = sys.modules.get("miniray.data.stats")
    return stats.running() if stats is not None else []


def _ended_metrics(kind: str, name: str) -> tuple[str, str, Tags]:
    """Return the metrics of how many calls of a name have ended and how long, and their tags."""
    if kind == "NORMAL_TASK":
        return "tasks_finished_total", "task_seconds", (("function", name),)
    of, _, method = name.rpartition(".")
    return "actor_calls_total", "actor_call_seconds", (("class", of), ("method", method))


def _kind(call: Call) -> str:
    if isinstance(call.channel, ActorClient):
        return "ACTOR_TASK"
    return "NORMAL_TASK" if isinstance(call.options, TaskGroup) else "ACTOR_CREATION_TASK"


# --- threads and coroutines --------------------------------------------------------------


def _threads() -> Iterator[dict[str, Any]]:
    """Yield call, awaited objects and stack of each thread and coroutine of user code."""
    from miniray.profiling.stacks import chains, execution_of

    for chain in itertools.islice(chains(), _MAX_THREADS):
        waits: list[bytes] = []
        needed = 0
        for frame in reversed(chain.frames):
            local = _WAITS.get(frame.f_code)
            if local is not None:
                waits = _ids_of(frame.f_locals.get(local, ()))
                needed = min(int(frame.f_locals.get("needed", 1)), len(waits))
        stack, execution = chain.stack(), chain.execution or execution_of(chain.frames)
        if stack or waits:
            yield {
                "thread": chain.who,
                "task_id": execution.task_id if execution is not None else b"",
                "waits_for": waits,
                #: How many of these it needs.
                "needed": needed,
                "stack": stack[-_MAX_FRAMES:],
            }


def _ids_of(found: Any) -> list[bytes]:
    """Return the ids of the entries that a wait still lacks."""
    entries = found if isinstance(found, (list, tuple)) else [found]
    return [entry.id for entry in entries if entry.value is None][:_MAX_IDS]


# --- objects -----------------------------------------------------------------------------


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
        """Return all reasons for an object; refs without a holder found are user code's.

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
    #: Actors that the process made or has called.
    actors: ActorClients
    #: Gives the calls that run here, and the refs that they hold.
    executing: Callable[[], Iterable[tuple[str, Iterable[ObjectRef[Any]]]]]

    def held(self, limit: int, detail: bool) -> Callable[[], ObjectsHeld]:
        """Return what makes the report, for a thread: there may be millions of objects.

        Args:
            limit: How many objects are listed one by one: the largest.
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
        """Return whether a value may be in shared memory; if unread, only its owner can say."""
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
        return self._object_row(entry.id, value, status, call_site, reasons, borrowers)

    def _arguments_row(self, arguments: _Arguments) -> ObjectRow:
        call = arguments.call
        name = call.name if isinstance(call, Call) else _again(call)
        hold: Hold = {"kind": "USED_BY_PENDING_TASK", "count": 1, "names": [name]}
        status = call.status if isinstance(call, Call) else "FINISHED"
        return self._object_row(
            b"", arguments.value, status, f"arguments of {call.name}", [hold], []
        )

    def _object_row(
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
