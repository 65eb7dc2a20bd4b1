"""Making lost values again: which tasks run once more, and the error when none can.

The owner of a value decides. Readers, here and in other processes, name the value that they could
not load; if it was replaced meanwhile, they read again. What was lost with the same node is made
again together, so that what several values were made from is made once.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from miniray.calls.call import Call
from miniray.common.names import describe
from miniray.common.series import COUNTED
from miniray.exceptions import ObjectLostError
from miniray.messages.value import error_value, is_shared, node_of, payload_of, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.calls.call import Origin
    from miniray.calls.calls import CallTable
    from miniray.common.object_ref import ObjectRef
    from miniray.messages.value import Value
    from miniray.objects.borrowing import Borrowing
    from miniray.objects.objects import Entry, ObjectTable
    from miniray.wire.node_link import NodeLink

_NO_ORIGIN = (
    "only results of tasks that may run again (max_retries) can be made again, not values of put() "
    "or results of actors whose calls may not (max_task_retries)"
)
_LIMITS = (
    "a process remembers MINIRAY_LINEAGE_CALLS tasks, and MINIRAY_LINEAGE_BYTES of their "
    "arguments, before the oldest are given up"
)


@dataclasses.dataclass(eq=False, repr=False)
class ValueRecovery:
    """Runs tasks again whose results were lost. Thread-safe."""

    _table: ObjectTable
    _borrowing: Borrowing
    _calls: CallTable
    _link: NodeLink

    def __post_init__(self) -> None:
        self._lineage = self._calls.lineage
        #: By node: objects whose values were there and are lost, while the daemon looks up the
        #: others.
        self._missing: dict[bytes, set[bytes]] = {}
        # Reentrant: a garbage collection may run user code, which may drop refs, anywhere.
        self._lock = threading.RLock()

    def lost(self, entry: Entry, value: Value) -> str | None:
        """Replace a value that cannot be loaded.

        Returns:
            None if another one is there or will come, maybe an error; else why none will.
        """
        if not self._table.is_owned(entry.id):
            self._borrowing.lost(entry, value)
            return None
        return self.again(entry.id, payload_of(value))

    def again(self, id: bytes, payload: Any) -> str | None:
        """Replace a lost value of this process.

        Args:
            id: of an object of this process.
            payload: of the value in shared memory that could not be loaded.
        """
        with self._lock:
            entry = self._table.entry(id)
            if entry is None:
                return "its owner had freed it already"
            value = entry.value
            if value is None or payload_of(value) != payload:
                return None
            node = node_of(value)
            own = node == self._table.node_id  # it lives: only this value was lost
            _, reason = ([], self._make(id, node)) if own else self._plan(id)
            if reason is not None:
                COUNTED.count("objects_lost_total")
                return f"it was on node {node.hex()}; {reason}"
            if own:
                return None
            self._table.forget_value(id)
            self._calls.free_value(value)
            first = node not in self._missing
            self._missing.setdefault(node, set()).add(id)
        if first:
            self._link.node_request_async(
                "lost_values", (node,), lambda error, lost, _: self._found(node, error, lost)
            )
        return None

    def _found(self, node: bytes, error: Any, segments: Iterable[int]) -> None:
        """Make again all values that the daemon reports as lost with a node."""
        lost = set() if error else set(segments)
        with self._lock:
            missing = self._missing.pop(node)
            for entry in self._table.snapshot():
                where, segment, _ = place_of(entry.value)
                with_it = where == node and segment in lost and self._table.is_owned(entry.id)
                if with_it or (entry.value is None and entry.id in missing):
                    self._make_or_fail(entry.id, node)

    def _make(self, id: bytes, node: bytes) -> str | None:
        """Run what made a value that was on a node; return why that cannot be done."""
        with self._lock:
            plan, reason = self._plan(id)
            if reason is None and not self._lineage.run(plan):
                reason = f"what made it is remembered no longer: {_LIMITS}"
            if reason is None:
                for result in plan[0].return_ids:
                    self._forget(result, node)
                self._carry_out(plan)
            return reason

    def _make_or_fail(self, id: bytes, node: bytes) -> None:
        """Make a value again that was on a node; else it becomes an error."""
        if self._calls.find(id) is not None:
            return  # with another result of the same task
        reason = self._make(id, node)
        if reason is not None:
            COUNTED.count("objects_lost_total")
            why = f"it was on node {node.hex()}, and no other node has a copy; {reason}"
            self._table.set_value(id, error_value(ObjectLostError(id.hex(), why)))

    def _forget(self, id: bytes, node_id: bytes) -> None:
        """Make a result of a task pending again, if it was where the lost one was."""
        entry = self._table.entry(id)
        value = None if entry is None else entry.value
        if value is not None and is_shared(value) and node_of(value) == node_id:
            self._table.forget_value(id)
            self._calls.free_value(value)  # its node may live, with the segment gone

    def _plan(self, id: bytes) -> tuple[list[Origin], str | None]:
        """Return all tasks that have to run for a result, or why they cannot."""
        plan: dict[int, Origin] = {}
        pending = [id]
        while pending:
            needed = pending.pop()
            origin = self._lineage.find(needed)
            if origin is None:
                return [], self._without_origin(needed)
            if origin.number in plan:
                continue
            if origin.retries == 0:
                return [], f"{origin.name} ran as often as its max_retries allows"
            plan[origin.number] = origin
            for source, _ in origin.needs:
                if self._table.entry(source) is not None:
                    continue
                if self._lineage.find(source) is None:
                    return [], (
                        f"{origin.name} cannot run again, because ObjectRef({source.hex()}), "
                        f"which is one of its arguments, was freed; {_NO_ORIGIN}"
                    )
                pending.append(source)
        return list(plan.values()), None

    def _without_origin(self, id: bytes) -> str:
        """Return why a value cannot be made again, and where it came from."""
        entry = self._table.entry(id)
        made = None if entry is None else getattr(entry, "made", None)
        if entry is not None and entry.kept:
            return f"it was a result of {made}, which is remembered no longer: {_LIMITS}"
        if made is None:
            return _NO_ORIGIN
        what = f"a result of {made}" if isinstance(made, str) else f"put at {describe(made)}"
        return f"it was {what}, and {_NO_ORIGIN}"

    def _carry_out(self, plan: list[Origin]) -> None:
        plan = sorted(plan, key=lambda origin: origin.number)  # arguments first
        pins = [self._pins(origin) for origin in plan]  # all of them before anything runs
        for origin, held in zip(plan, pins, strict=True):
            self._lineage.spend(origin)
            call = Call(
                number=self._calls.next_number(),
                target=origin.target,
                name=origin.name,
                channel=origin.channel,
                arguments=origin.arguments,
                refs=origin.refs,
                pins=held,
                return_ids=tuple(origin.return_ids),
                retries=origin.retries,
                retry_exceptions=origin.retry_exceptions,
                options=origin.options,
                repeatable=origin.retries != 0,
                origin=origin,
            )
            COUNTED.count("objects_remade_total", by=float(len(call.return_ids)))
            self._calls.submit(call)

    def _pins(self, origin: Origin) -> list[ObjectRef[Any]]:
        """Hold what a task needs for its call; what is gone becomes an object to be made."""
        pins = []
        for id, node in origin.needs:
            ref, entry = self._table.adopt(id, node)
            pins.append(ref)
            if self._table.is_owned(id) and not entry.kept and entry.value is None:
                origin_of = self._lineage.find(id)
                if origin_of is not None:
                    entry.kept = True
                    self._lineage.use(id)
        return pins
