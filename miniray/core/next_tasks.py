"""Tasks that wait while all leases of their shape are busy: one for each lease is the next there.

So what it will read can move to that lease's node while another task runs. Which tasks there are,
and when one is sent, is for ``task_client.py``, whose lock protects this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.core import protocol as p

if TYPE_CHECKING:
    from miniray.core.calls import Call, CallTable
    from miniray.core.objects import Value
    from miniray.core.task_client import Lease, LeaseGroup


class NextTasks:
    """Chooses them, and tells the workers."""

    def __init__(self, calls: CallTable) -> None:
        self._calls = calls

    def choose(self, group: LeaseGroup) -> None:
        """Give leases that have none the first tasks of the queue, if their arguments must move."""
        queue = group.queue
        if group.spread or not queue:  # those that are spread run anywhere but here
            return
        values = self._shared(queue[0])
        for lease in group.leases.values():
            if not values:
                return  # it begins as soon as it is sent, and those behind it are soon the first
            if lease.next is not None or lease.leaving or not lease.calls:
                continue
            node = lease.peer.node_id
            remote = [(form, where, ()) for form, where, _ in values if where[0] != node]
            if remote:
                lease.next = call = queue.popleft()
                group.chosen[lease.id] = lease
                lease.peer.send((p.PEER_AHEAD, call.number, remote))
                values = self._shared(queue[0]) if queue else []

    def _shared(self, call: Call) -> list[Value]:
        """What a task reads from shared memory."""
        values: list[Value | None] = [call.arguments]
        if call.refs:
            values += [value for *_, value in self._calls.resolved_refs(call)[0]]
        return [value for value in values if value is not None and value[0] == p.VALUE_SHARED]

    def take(self, lease: Lease, group: LeaseGroup) -> Call | None:
        """What to send to a lease: its next task, or else one that waits for any, or another."""
        if lease.next is not None:
            call, lease.next = lease.next, None  # its worker hears of it by getting it
            del group.chosen[lease.id]
            return call
        if group.queue:
            return group.queue.popleft()
        if group.chosen:
            return self._take_back(next(iter(group.chosen.values())), group)
        return None

    @staticmethod
    def _take_back(lease: Lease, group: LeaseGroup) -> Call | None:
        """What is next at a lease is not any more; returns it."""
        call, lease.next = lease.next, None
        group.chosen.pop(lease.id, None)
        if call is not None and not lease.peer.lost:
            lease.peer.send((p.PEER_AHEAD, call.number, ()))
        return call

    def give_up(self, lease: Lease, group: LeaseGroup) -> None:
        """A lease takes no more tasks: what was next there is the first that waits."""
        call = self._take_back(lease, group)
        if call is not None:
            group.queue.appendleft(call)

    def give_up_all(self, group: LeaseGroup) -> None:
        """All that wait are in the queue again, in their order."""
        for lease in reversed(list(group.chosen.values())):
            self.give_up(lease, group)

    def withdraw(self, call: Call, group: LeaseGroup) -> bool:
        """A task is not to run; False if it is not next anywhere."""
        for lease in group.chosen.values():
            if lease.next is call:
                self._take_back(lease, group)
                return True
        return False
