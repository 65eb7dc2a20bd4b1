"""Leases of workers for tasks: how many each client wants of a shape, has, and gives back.

A client reports how many leases of a group it wants in all. Only one request of a group
waits at the scheduler (more while leases for it are on their way back), so that a long
queue of tasks costs nothing here. None waits while many of its workers start: those that
run may be done with the queue before.
"""

from __future__ import annotations

import collections
import dataclasses
import pickle
from typing import TYPE_CHECKING

from miniray._proto import head_pb2
from miniray.common.specs import GrantedLease, JobSpec, LeaseSpec
from miniray.exceptions import PlacementGroupRemovedError, TaskUnschedulableError
from miniray.head.directories.clients import ProcessExit
from miniray.head.directories.grants import RequestSummary
from miniray.head.scheduling.demands import Demand
from miniray.head.scheduling.reasons import ReasonKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.specs import Allocation
    from miniray.head.directories.clients import (
        AttachedProcess,
        ClientDirectory,
        ProcessEnds,
    )
    from miniray.head.directories.grants import GrantTable
    from miniray.head.directories.jobs import JobDirectory
    from miniray.head.directories.nodes import NodeDirectory
    from miniray.head.scheduling.reasons import Reason


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class TaskLeaseGroup:
    """The leases of one client for tasks of one shape: wanted, waiting, granted."""

    client_id: bytes
    id: int
    #: Of the first of its tasks that waited at the client's last request.
    name: str
    job_id: bytes
    #: Node of the client.
    home: str
    demand: Demand
    spec: LeaseSpec
    #: The job, as the workers of its leases receive it.
    job: JobSpec
    #: Leases wanted in all, those had included.
    total: int = 0
    #: Node where the first of its tasks should run, for what they read; empty: the client's.
    near: str = ""
    #: Numbers of the requests that wait.
    waiting: dict[int, None] = dataclasses.field(default_factory=dict)
    #: How many may wait. One that is granted is followed by the next one, behind requests of
    #: others: so groups of one shape take turns.
    may_wait: int = 1
    #: Leases granted and not returned.
    leases: dict[int, TaskLease] = dataclasses.field(default_factory=dict)
    #: Numbers of leases whose workers do not run yet.
    starting: set[int] = dataclasses.field(default_factory=set)
    #: How many workers in a row could not be started, by how many such failures are final.
    start_failures: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )
    #: Requests no lease until a pause after such a failure is over.
    pausing: bool = False

    @property
    def in_use(self) -> bool:
        kept_from = self.start_failures or self.pausing
        return bool(self.total or self.leases or self.waiting or kept_from)

    def remove(self, number: int) -> None:
        self.leases.pop(number, None)
        self.starting.discard(number)

    def max_calls(self, allocation: Allocation) -> int:
        """Return after how many tasks the worker of a lease ends; 0: no limit.

        A worker that had devices ends after a task by default, so that their memory is released.
        """
        given = self.spec.max_calls
        return int(bool(allocation.devices)) if given is None else given


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class TaskLease:
    """A lease on a worker that is granted to a client."""

    number: int
    group: TaskLeaseGroup
    node_id: bytes
    granted: float
    max_calls: int = 0
    #: Empty until the worker runs and the client is notified.
    process_id: bytes = b""
    #: It was requested back from the client.
    revoked: bool = False
    #: The daemon reported that it is over.
    ended: bool = False
    #: The client reported that it is over, or is gone.
    returned: bool = False

    @property
    def may_be_asked_for(self) -> bool:
        """Whether its client has it, or will, and it was not requested back yet."""
        return not (self.revoked or self.returned or self.ended)


#: Group of the leases that are reported to a restarted head; it never requests one.
_ADOPTED = -1
#: Seconds between attempts to start a worker, after the second failure in a row and at most.
_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
#: Workers of a group that may start at once (Ray: pending requests of a scheduling class), or as
#: many as there are CPUs: that alone limits tasks that take a whole one.
_MOST_STARTING = 10


@dataclasses.dataclass(eq=False, repr=False)
class TaskLeases:
    """Groups and leases of all clients. Implements ``grants.Requester`` for groups."""

    grants: GrantTable
    nodes: NodeDirectory
    clients: ClientDirectory
    jobs: JobDirectory
    ends: ProcessEnds

    def __post_init__(self) -> None:
        self._timers = self.grants.timers
        self._groups: dict[bytes, dict[int, TaskLeaseGroup]] = {}
        self.leases: dict[int, TaskLease] = {}
        #: Leases from before a restart of the head that clients reported to have.
        self._held: dict[bytes, set[int]] = {}
        #: Called when a lease is over, or its worker runs, so that it can be requested back.
        self.on_changed: list[Callable[[], None]] = []
        self.clients.on_ended.append(self._client_ended)

    # --- requests of clients ---------------------------------------------------------
    def want(
        self, client_id: bytes, group_id: int, spec: LeaseSpec, total: int, near: bytes = b""
    ) -> None:
        """Set how many leases a client wants of a group in all, and near which node, if any."""
        client = self.clients.get(client_id)
        if client is None:
            return  # it ended meanwhile
        groups = self._groups.setdefault(client_id, {})
        group = groups.get(group_id)
        if group is None:
            try:
                group = self._group(client, group_id, spec)
            except ValueError as error:
                self._fail(client_id, group_id, TaskUnschedulableError(str(error)))
                return
            groups[group_id] = group
        group.name, group.total, group.near = spec.name, total, near.hex()
        self._balance(group)
        self._forget_unused(group)

    def refuse(self, client_id: bytes, why: str, group_id: int, *_: object) -> None:
        error = TaskUnschedulableError(f"A task cannot be scheduled: {why}.")
        self._fail(client_id, group_id, error)

    def give_back(
        self, client_id: bytes, number: int, broken: bool = False, calls_left: int = 0
    ) -> None:
        """Take a lease back from its client; ``broken``: its worker is out of reach."""
        lease = self.leases.get(number)
        if lease is None:
            self._held.get(client_id, set()).discard(number)  # its node has yet to report it
        if lease is None or lease.returned or lease.group.client_id != client_id:
            return
        lease.group.total = max(0, lease.group.total - 1)
        self._drop(lease, kill=broken, calls_left=min(calls_left, lease.max_calls))
        self._balance(lease.group)
        self._forget_unused(lease.group)

    def _forget_unused(self, group: TaskLeaseGroup) -> None:
        if not group.in_use:
            self._groups.get(group.client_id, {}).pop(group.id, None)

    def _group(self, client: AttachedProcess, group_id: int, spec: LeaseSpec) -> TaskLeaseGroup:
        job = self.jobs.get(client.job_id)
        return TaskLeaseGroup(
            client_id=client.id,
            id=group_id,
            name=spec.name,
            job_id=client.job_id,
            home=client.node.name,
            demand=Demand.of(
                spec.resources,
                placement=spec.placement,
                label_selector=spec.label_selector,
                fallback_selectors=spec.fallback_selectors,
            ),
            spec=spec,
            job=job.spec if job is not None else JobSpec(),
        )

    def _balance(self, group: TaskLeaseGroup) -> None:
        """Submit or withdraw requests, so that as many wait as are wanted and allowed."""
        while len(group.waiting) < self._may_wait(group):
            number = self.grants.reserve_number()
            group.waiting[number] = None
            near, fill = group.near or group.home, bool(group.near)
            self.grants.submit(number, self, group, group.demand, near, fill=fill)
        while len(group.waiting) > max(0, self._may_wait(group)):
            number, _ = group.waiting.popitem()
            self.grants.withdraw(number)

    def _may_wait(self, group: TaskLeaseGroup) -> int:
        """Return how many of a group's requests may wait now; none if not above 0."""
        if group.pausing:
            return 0
        may_start = max(_MOST_STARTING, int(self.nodes.cpus)) - len(group.starting)
        return min(group.may_wait, group.total - len(group.leases), may_start)

    def recall_from(self, node_id: bytes) -> None:
        """Request all leases of a node back: each comes after the task that runs."""
        for lease in self.leases.values():
            if lease.node_id == node_id and lease.may_be_asked_for:
                self.ask_for(lease)

    def ask_for(self, lease: TaskLease) -> None:
        """Request a lease back from its client, once its worker runs."""
        lease.revoked = True
        if lease.process_id:
            self.clients.push(lease.group.client_id, "lease_revoked", lease.number, lease.group.id)

    def let_wait(self, group: TaskLeaseGroup, expected: int) -> None:
        """Let as many requests of a group wait as leases are expected to come back for it."""
        group.may_wait = max(1, expected)
        self._balance(group)

    def wait_again(self, group: TaskLeaseGroup) -> None:
        """Move a group's requests behind all others that wait."""
        for number in tuple(group.waiting):
            del group.waiting[number]
            self.grants.withdraw(number)
        self._balance(group)

    # --- decisions of the scheduler ----------------------------------------------------
    def granted(self, token: TaskLeaseGroup, number: int, allocation: Allocation) -> None:
        token.waiting.pop(number, None)
        node = self.nodes.get(bytes.fromhex(allocation.node_id))
        assert node is not None  # the scheduler has living nodes only
        limit = token.max_calls(allocation)
        lease = TaskLease(number, token, node.id, self._timers.time(), limit)
        self.leases[number] = token.leases[number] = lease
        token.starting.add(number)
        node.start(
            GrantedLease(
                number=number,
                epoch=self.grants.epoch,
                owner=token.client_id,
                job_id=token.job_id,
                job=token.job,
                spec=token.spec,
                allocation=allocation,
                max_calls=limit,
            )
        )
        self._balance(token)

    def refused(self, token: TaskLeaseGroup, number: int, reason: Reason) -> None:
        """Fail the group's tasks: no lease of it can ever be had."""
        token.waiting.pop(number, None)
        self._give_up(token, self._error(token, reason))

    def lost(self, token: TaskLeaseGroup, number: int) -> None:
        self._over(number)

    def must_end(self, token: TaskLeaseGroup, number: int) -> None:
        """End a lease whose placement group was removed; its client sees the worker end."""
        lease = self.leases.get(number)
        if lease is not None:
            if lease.process_id:
                self.ends.explain(
                    lease.process_id, "The placement group that it ran in was removed."
                )
            self._end(lease, kill=True)

    def first_waiting(self, client_id: bytes, group_id: int) -> int:
        """Return the number of a waiting request of a client's group; 0 if none waits."""
        group = self._groups.get(client_id, {}).get(group_id)
        return next(iter(group.waiting), 0) if group is not None else 0

    def describe(self, token: TaskLeaseGroup) -> RequestSummary:
        waiting = max(0, token.total - len(token.leases))
        return RequestSummary("task", token.name, token.job_id, token.client_id, waiting)

    @staticmethod
    def _error(group: TaskLeaseGroup, reason: Reason) -> Exception:
        placement = group.demand.placement
        if reason.kind is ReasonKind.GROUP_GONE:
            return PlacementGroupRemovedError(placement.placement_group_id.hex())  # type: ignore[union-attr]
        return TaskUnschedulableError(
            f"The task {group.name} cannot be scheduled: {reason.sentence()}."
        )

    # --- reports of daemons ------------------------------------------------------------
    def started(self, number: int, process_id: bytes, calls_left: int = 0) -> None:
        """Hand a lease to its client: its worker runs.

        ``calls_left`` is after how many tasks it ends, if it has run some already; else 0.
        """
        lease = self.leases.get(number)
        if lease is None or lease.returned or lease.ended or lease.process_id:
            return
        lease.process_id = process_id
        lease.group.starting.discard(number)
        lease.group.start_failures.clear()
        self.clients.push(
            lease.group.client_id,
            "lease_granted",
            lease.group.id,
            number,
            lease.node_id,
            process_id,
            calls_left or lease.max_calls,
        )
        if lease.revoked:  # while its worker started
            self.ask_for(lease)
        self._balance(lease.group)
        self._notify_changed()

    def failed(self, number: int, error: bytes, tries: int) -> None:
        """Drop a lease whose worker did not start; ``tries`` such failures in a row are final."""
        lease = self.leases.pop(number, None)
        if lease is not None and not lease.returned:
            self._start_failed(lease, error, tries)
        self.grants.release(number)

    def _start_failed(self, lease: TaskLease, error: bytes, tries: int) -> None:
        lease.ended = lease.returned = True
        group = lease.group
        group.remove(lease.number)
        group.start_failures[tries] += 1
        if group.start_failures[tries] < tries:
            self._pause(group, group.start_failures.total())
        else:
            self._give_up(group, error)

    def _pause(self, group: TaskLeaseGroup, failures: int) -> None:
        """Retry after a pause, a longer one after each failure in a row but the first."""
        if failures > 1 and not group.pausing:
            group.pausing = True
            delay = min(_PAUSE * 2 ** (failures - 2), _LONGEST_PAUSE)
            self._timers.call_later(delay, lambda: self._go_on(group))
        self._balance(group)

    def _go_on(self, group: TaskLeaseGroup) -> None:
        group.pausing = False
        self._balance(group)

    def over(self, number: int) -> None:
        self._over(number)
        self.grants.release(number)
        self._notify_changed()

    def _notify_changed(self) -> None:
        for hook in self.on_changed:
            hook()

    def _over(self, number: int) -> None:
        lease = self.leases.get(number)
        if lease is None:
            return
        lease.ended = True
        if lease.returned:
            del self.leases[number]
        elif not lease.process_id:
            # Its client was not notified of it.
            del self.leases[number]
            lease.group.remove(number)
            self._balance(lease.group)

    # --- restarts of the head ------------------------------------------------------------
    def adopt(self, number: int, owner: bytes, node_id: bytes, process_id: bytes) -> None:
        """Enter a lease that a daemon reports after a restart of the head."""
        groups = self._groups.setdefault(owner, {})
        group = groups.get(_ADOPTED)
        if group is None:
            spec = LeaseSpec(name="", resources={})
            demand = Demand.of(spec.resources)
            group = TaskLeaseGroup(
                owner, _ADOPTED, "", b"", "", demand, spec, JobSpec(), may_wait=0
            )
            groups[_ADOPTED] = group
        lease = TaskLease(number, group, node_id, self._timers.time(), process_id=process_id)
        # The client has another number for its group, so the lease cannot be requested back.
        lease.revoked = True
        self.leases[number] = group.leases[number] = lease
        self.grants.restore(number, self, group, group.demand)
        group.total = len(group.leases)
        if number not in self._held.get(owner, (number,)):
            self.give_back(owner, number)

    def hold(self, client_id: bytes, numbers: list[int]) -> None:
        """End the adopted leases that a client reports not to have."""
        held = self._held[client_id] = set(numbers)
        group = self._groups.get(client_id, {}).get(_ADOPTED)
        if group is not None:
            for number in [each for each in group.leases if each not in held]:
                self.give_back(client_id, number)

    def end_orphans(self) -> None:
        for client_id in [c for c in self._groups if self.clients.get(c) is None]:
            self._client_ended(client_id, ProcessExit())

    # --- ending ------------------------------------------------------------------------
    def _drop(self, lease: TaskLease, *, kill: bool, calls_left: int = 0) -> None:
        lease.returned = True
        lease.group.remove(lease.number)
        if lease.ended:
            self.leases.pop(lease.number, None)
        else:
            self._end(lease, kill=kill, calls_left=calls_left)

    def _end(self, lease: TaskLease, *, kill: bool, calls_left: int = 0) -> None:
        node = self.nodes.get(lease.node_id)
        if node is not None and not lease.ended:
            end = head_pb2.EndLease(lease=lease.number, kill=kill, calls_left=calls_left)
            node.send(end_lease=end)

    def _give_up(self, group: TaskLeaseGroup, error: BaseException | bytes) -> None:
        """Fail the group's queued tasks; it keeps the leases that it has."""
        group.total = len(group.leases)
        group.start_failures.clear()
        self._balance(group)
        self._forget_unused(group)
        self._fail(group.client_id, group.id, error)

    def _fail(self, client_id: bytes, group_id: int, error: BaseException | bytes) -> None:
        pickled = error if isinstance(error, bytes) else pickle.dumps(error, 5)
        self.clients.push(client_id, "lease_failed", group_id, pickled)

    def _client_ended(self, process_id: bytes, how: ProcessExit) -> None:
        self._held.pop(process_id, None)
        for group in self._groups.pop(process_id, {}).values():
            group.total = 0
            for lease in list(group.leases.values()):
                self._drop(lease, kill=True)
            self._balance(group)
