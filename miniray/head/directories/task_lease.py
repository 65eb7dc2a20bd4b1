"""What one client wants of workers for tasks of one shape, and the leases that it has of it."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miniray.common.specs import Allocation, JobSpec, LeaseSpec
    from miniray.head.scheduling.demands import Demand
    from miniray.head.scheduling.reasons import Told


@dataclasses.dataclass(eq=False, slots=True)
class TaskLeaseGroup:
    """What one client wants of one shape."""

    client_id: bytes
    id: int
    #: Of the first of its tasks that waited when the client asked last.
    name: str
    job_id: bytes
    #: Node of the client.
    home: str
    demand: Demand
    spec: LeaseSpec
    #: What the workers of its leases are told of their job.
    job: JobSpec
    #: Leases wanted in all, those had included.
    total: int = 0
    #: Node where the first of its tasks should run, for what they read; empty: the client's.
    near: str = ""
    #: When the client was told that there is no room on that node.
    told_full: float = -math.inf
    #: Numbers of the requests that wait.
    waiting: dict[int, None] = dataclasses.field(default_factory=dict)
    #: How many may wait. One that is granted is followed by the next one, behind those of
    #: others: so groups of one shape take turns.
    may_wait: int = 1
    #: Leases granted and not returned.
    leases: dict[int, TaskLease] = dataclasses.field(default_factory=dict)
    #: Numbers of those whose workers do not run yet.
    starting: set[int] = dataclasses.field(default_factory=set)
    #: It heard why it waits, and nothing was granted since.
    told: Told = 0
    #: How many workers in a row could not be started, by how many such failures are final.
    start_failures: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )
    #: Asks for no lease until a pause after such a failure is over.
    pausing: bool = False

    @property
    def in_use(self) -> bool:
        """Whether its client wants leases or has some, or it is known what kept it from them."""
        kept_from = self.told or self.start_failures or self.pausing
        return bool(self.total or self.leases or self.waiting or kept_from)

    def remove(self, number: int) -> None:
        """A lease is over."""
        self.leases.pop(number, None)
        self.starting.discard(number)

    def max_calls(self, allocation: Allocation) -> int:
        """After how many tasks the worker of a lease ends; 0: no limit.

        One that had devices ends after a task unless it is told otherwise, so that their memory
        is released.
        """
        given = self.spec.max_calls
        return int(bool(allocation.devices)) if given is None else given


@dataclasses.dataclass(eq=False, slots=True)
class TaskLease:
    """A granted lease of a worker."""

    number: int
    group: TaskLeaseGroup
    node_id: bytes
    granted: float
    max_calls: int = 0
    #: Empty until the worker runs and the client knows.
    process_id: bytes = b""
    #: The client was asked to give it back.
    revoked: bool = False
    #: The daemon said that it is over.
    ended: bool = False
    #: The client said so, or is gone.
    returned: bool = False
