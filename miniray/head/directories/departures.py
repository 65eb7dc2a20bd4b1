"""Workers that have done their work, and keep what others wait for.

A worker keeps its devices until its process is gone, and before a planned exit a process waits for
the calls that it has made. If these need its devices, that would never end. So there is a rule of
time: it is ended when others have waited for what it keeps, and none of its own tasks gets on.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from miniray._proto import head_pb2
from miniray.exceptions import describe_eviction

if TYPE_CHECKING:
    from miniray.common.amounts import Needs
    from miniray.head.directories.grants import GrantTable, Request, Timers
    from miniray.head.directories.leases import TaskLeases
    from miniray.head.directories.nodes import NodeDirectory

#: Waiting requests that are looked at in one round, in order of arrival.
_MAX_SCANNED = 512


class Departures:
    """One timer that looks at the workers that are leaving, while requests wait."""

    def __init__(
        self,
        grants: GrantTable,
        leases: TaskLeases,
        nodes: NodeDirectory,
        timers: Timers,
        *,
        patience: float,
    ) -> None:
        """Watch over a table of grants.

        Args:
            grants: what waits, and whose workers are leaving.
            leases: the tasks of those workers.
            nodes: where they are.
            timers: the event loop.
            patience: seconds for which others wait, and a worker leaves, before it is ended.
        """
        self._grants = grants
        self._leases = leases
        self._nodes = nodes
        self._timers = timers
        self._patience = patience
        #: Leases whose workers were leaving when this looked last.
        self._leaving: set[int] = set()
        self._armed = False
        grants.on_contention.append(self._arm)

    def _arm(self) -> None:
        if not self._armed and (self._grants.waiting or self._grants.waiting_groups):
            self._armed = True
            self._timers.call_later(self._patience, self._look)

    def _look(self) -> None:
        self._armed = False
        leaving = {each.number: each for each in self._grants.requests() if each.leaving}
        wanted = self._wanted()
        for number in sorted(self._leaving & leaving.keys()):
            self._end_if_in_the_way(leaving[number], wanted)
        self._leaving = set(leaving)
        self._arm()

    def _wanted(self) -> set[str]:
        """Return the resources that somebody has waited for long; CPU is given back by waiting."""
        long_ago = self._timers.time() - self._patience
        scheduler = self._grants.scheduler
        groups = [id for id, since in self._grants.waiting_groups.items() if since <= long_ago]
        states = [state for id in groups if (state := scheduler.group(id)) is not None]
        needs = [spec.needs for state in states for spec in state.missing.values()]
        first = itertools.islice(self._grants.waiting.values(), _MAX_SCANNED)
        needs += [request.demand.placing for request in first if request.since <= long_ago]
        return {name for each in needs for name in _names(each)}

    def _end_if_in_the_way(self, request: Request, wanted: set[str]) -> None:
        lease = self._grants.lease(request.number)
        if lease is None:
            return
        kept = lease.allocation.names() & wanted
        node = self._nodes.get(bytes.fromhex(lease.allocation.node_id))
        if not kept or node is None or self._gets_on(request.leaving, kept):
            return
        why = describe_eviction(self._patience, " and ".join(sorted(kept)))
        node.send(end_lease=head_pb2.EndLease(lease=request.number, kill=True, why=why))

    def _gets_on(self, process_id: bytes, kept: set[str]) -> bool:
        """Whether a process has a task that runs, or one that waits for other resources."""
        for group in self._leases.of_client(process_id):
            requests = [self._grants.request(number) for number in group.leases]
            if any(request is not None and not request.blocked for request in requests):
                return True
            if group.total > len(group.leases) and not kept & _names(group.demand.placing):
                return True
        return False


def _names(needs: Needs) -> set[str]:
    return {name for name, _ in needs} - {"CPU"}
