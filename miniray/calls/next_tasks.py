"""Which of the tasks that wait goes to which lease.

While all leases of a shape are busy, one task is the next at each: so what it will read can move to
that lease's node while another task runs. When one is sent is for ``task_client.py``, whose lock
protects this; where a task should run, for ``locality.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.calls.locality import preferred
from miniray.messages import protocol as p

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.calls.call import Call
    from miniray.calls.calls import CallTable
    from miniray.calls.lease_groups import Lease, LeaseGroup

#: So many leases are looked at when something changes: each change makes room at one.
_LOOK = 8


class NextTasks:
    """Chooses them, and tells the workers."""

    def __init__(self, calls: CallTable, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._clock = clock

    def enter(self, call: Call, group: LeaseGroup) -> None:
        """Queue a task whose values are there, behind the others."""
        group.queue.append(call)
        if call.refs:
            self._wish(call, group)

    def put_back(self, calls: Sequence[Call], group: LeaseGroup) -> None:
        """Tasks that were taken are the first in the queue again, in this order."""
        group.queue.extendleft(reversed(calls))
        for call in calls:
            if call.refs:
                self._wish(call, group)

    def _wish(self, call: Call, group: LeaseGroup) -> None:
        if group.spec["placement"] is None:
            values = self._calls.shared_values(call)
            where = preferred(values, self._calls.copies(call)) if values else None
            if where is not None:
                group.wishes.add(call, *where, self._clock())

    def choose(self, group: LeaseGroup) -> None:
        """Give leases that have none one of the first tasks, if its arguments must move there."""
        queue = group.queue
        if group.spread or not queue:  # those that are spread run anywhere but here
            return
        if group.with_room:
            return  # what these leave to other nodes is theirs once it has waited long enough
        call = queue[0]
        values = self._calls.shared_values(call)
        without = group.without_next
        for _ in range(min(len(without), _LOOK)):
            lease = next(iter(without.values()))
            without.move_to_end(lease.id)
            if lease.leaving or not lease.calls:
                continue
            node = lease.peer.node_id
            index = self._best(group, node)
            if index is None:
                continue
            if queue[index] is not call:
                call = queue[index]
                values = self._calls.shared_values(call)
            if not values:
                return  # it begins as soon as it is sent, and those behind it are soon the first
            remote = [(form, where, ()) for form, where, _ in values if where[0] != node]
            if remote:
                self._take_out(group, index)
                lease.next = call
                group.chosen[lease.id] = lease
                del without[lease.id]
                lease.peer.send((p.PEER_AHEAD, call.number, remote))
                if not queue:
                    return

    def _best(self, group: LeaseGroup, node: bytes) -> int | None:
        """Which of the queued tasks a lease on a node should run; None: none for now."""
        if not group.wishes.by_number:
            return 0
        return group.wishes.best(group.queue, node, self._clock())

    def patience(self, group: LeaseGroup) -> tuple[float, float] | None:
        """When a task that waits for a certain node may go to another, and in how many seconds.

        None if none waits.
        """
        now = self._clock()
        until = group.wishes.until(group.queue, now)
        return None if until is None else (until, until - now)

    def lose_patience(self, group: LeaseGroup) -> None:
        """Tasks that have waited long enough for a certain node may go to others."""
        group.wishes.give_up(group.queue, self._clock())

    def full(self, node: bytes, group: LeaseGroup) -> None:
        """There is no room for a further lease on a node: those that are there may be enough."""
        now = self._clock()
        group.wishes.no_further(node, now)
        if not any(lease.open and lease.peer.node_id == node for lease in group.leases.values()):
            group.wishes.full(node, now)

    def wanted(self, group: LeaseGroup, near: bytes) -> int:
        """How many leases would be of use in all, when those with room have what they may take.

        If there is no room for another one where the first task should run, those will serve it.
        """
        in_vain = group.wishes.asks_in_vain(near, self._clock())
        spare = len(group.with_room) if in_vain else 0
        return len(group.leases) + max(0, group.waiting - spare)

    @staticmethod
    def _take_out(group: LeaseGroup, index: int) -> Call:
        """Take a task out of the queue."""
        queue = group.queue
        call = queue[index]
        del queue[index]
        group.wishes.drop(call)
        return call

    def take(self, lease: Lease, group: LeaseGroup) -> Call | None:
        """What to send to a lease: its next task, or else one that waits for any, or another."""
        if lease.next is not None:
            call, lease.next = lease.next, None  # its worker hears of it by getting it
            del group.chosen[lease.id]
            group.without_next[lease.id] = lease
            return call
        if group.queue:
            if not group.wishes.by_number:
                return group.queue.popleft()
            index = self._best(group, lease.peer.node_id)
            if index is not None:
                return self._take_out(group, index)
        if group.chosen:
            return self._take_back(next(iter(group.chosen.values())), group)
        return None

    @staticmethod
    def _take_back(lease: Lease, group: LeaseGroup) -> Call | None:
        """What is next at a lease is not any more; returns it."""
        call, lease.next = lease.next, None
        group.chosen.pop(lease.id, None)
        if call is not None and lease.id in group.leases:
            group.without_next[lease.id] = lease
        if call is not None and not lease.peer.lost:
            lease.peer.send((p.PEER_AHEAD, call.number, ()))
        return call

    def give_up(self, lease: Lease, group: LeaseGroup) -> None:
        """A lease takes no more tasks: what was next there is the first that waits."""
        call = self._take_back(lease, group)
        if call is not None:
            self.put_back((call,), group)

    def leave_all(self, group: LeaseGroup) -> list[Call]:
        """Take out all tasks that wait, in their order."""
        for lease in reversed(list(group.chosen.values())):
            self.give_up(lease, group)
        calls = list(group.queue)
        group.queue.clear()
        group.wishes.clear()
        return calls

    def withdraw(self, call: Call, group: LeaseGroup) -> None:
        """A task that waits is not to run."""
        if call in group.queue:
            group.queue.remove(call)
            group.wishes.drop(call)
            return
        for lease in group.chosen.values():
            if lease.next is call:
                self._take_back(lease, group)
                return
