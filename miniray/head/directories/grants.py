"""Carries the scheduler's decisions to the requesters: grants, refusals, lost leases.

Responsible for the waiting requests and their timers; ``scheduler.py`` decides, and the requester
uses the grant.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from miniray.common.series import COUNTED, SECONDS, took
from miniray.head.scheduling.demands import LeaseRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.specs import Allocation
    from miniray.head.scheduling.bundles import GroupPlacement
    from miniray.head.scheduling.demands import Decisions, Demand
    from miniray.head.scheduling.reasons import Reason
    from miniray.head.scheduling.scheduler import ClusterScheduler

logger = logging.getLogger(__name__)

#: Lease numbers of one start of the head; the start counter is in the bits above.
_NUMBER_BITS = 32


class Timers(Protocol):
    """The part of an event loop that the head uses."""

    def time(self) -> float:
        """Return the seconds of a monotonic clock."""

    def call_later(self, delay: float, callback: Callable[[], object]) -> Any:
        """Call back after ``delay`` seconds."""


class RequestSummary(NamedTuple):
    """A waiting request, for messages and listings."""

    #: "task" or "actor".
    kind: str
    #: Name of the function or class.
    name: str
    job_id: bytes
    #: The process whose call it is.
    process_id: bytes
    #: How many leases it waits for in all, with those it has not requested yet.
    waiting: int = 1


class Requester(Protocol):
    """Requests leases, and receives them. ``token`` is what it passed with its request."""

    def granted(self, token: Any, number: int, allocation: Allocation) -> None:
        """Use a lease that was granted."""

    def refused(self, token: Any, number: int, reason: Reason) -> None:
        """Fail a request that can never have its lease."""

    def lost(self, token: Any, number: int) -> None:
        """Handle the loss of a lease with its node."""

    def must_end(self, token: Any, number: int) -> None:
        """End what runs on a lease whose placement group was removed."""

    def describe(self, token: Any) -> RequestSummary:
        """Return what listings show of a request."""


class GroupRequester(Protocol):
    """Requests placement groups, and is notified of them."""

    def placed(self, group_id: bytes) -> None:
        """Handle that all bundles of a group have their nodes."""

    def job_of(self, group_id: bytes) -> bytes:
        """Return the id of a group's job; empty if its creator is gone."""


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Request:
    """A waiting request, or its lease."""

    number: int
    requester: Requester
    token: Any
    demand: Demand
    #: When it was made, by the loop's clock.
    since: float
    #: When it was made, in seconds since the epoch.
    since_epoch: float


@dataclasses.dataclass(eq=False, repr=False)
class GrantTable:
    """Requests and leases by number, over one scheduler."""

    scheduler: ClusterScheduler
    timers: Timers
    #: The head's start counter; makes numbers unique over restarts.
    epoch: int
    #: Seconds of waiting after which the driver is notified.
    warn_after: float
    #: Called with the id of a job of which something has waited long, or cannot be served, and how
    #: many requests wait.
    _on_wait: Callable[[bytes, int], None]

    def __post_init__(self) -> None:
        self._numbers = itertools.count((self.epoch << _NUMBER_BITS) + 1).__next__
        self._requests: dict[int, Request] = {}
        #: Waiting requests, in order of arrival.
        self.waiting: dict[int, Request] = {}
        #: Placement groups that were never placed, and since when they wait.
        self.waiting_groups: dict[bytes, float] = {}
        #: Called when a request begins to wait, when leases are granted while some wait, and
        #: when capacity was reserved.
        self.on_contention: list[Callable[[], None]] = []
        #: Called after a lease has ended.
        self.on_released: list[Callable[[], None]] = []
        #: Of all placement groups, once there was one.
        self._groups: GroupRequester
        self._todo: collections.deque[Decisions] = collections.deque()
        self._busy = False
        self._deadline_armed = False
        self._took = COUNTED.values(("histogram", "head_decision_seconds", "", SECONDS), ())

    # --- leases --------------------------------------------------------------------
    def reserve_number(self) -> int:
        """Return a number for ``submit``: the requester needs it before the answer."""
        return self._numbers()

    def is_of_before(self, number: int) -> bool:
        """Return whether an earlier head made this number."""
        return number >> _NUMBER_BITS != self.epoch

    def submit(
        self,
        number: int,
        requester: Requester,
        token: Any,
        demand: Demand,
        near: str | None,
        *,
        fill: bool = False,
    ) -> None:
        """Request a lease; the requester may be called, with the token, before this returns.

        The number, from ``reserve_number``, names the request and its lease. The default policy
        prefers the node ``near``; with ``fill``, as long as it has capacity.
        """
        now = self.timers.time()
        request = Request(number, requester, token, demand, now, time.time())
        self._requests[number] = self.waiting[number] = request
        began = time.perf_counter()
        decided = self.scheduler.submit(LeaseRequest(number, demand, near, fill), now)
        took(self._took, time.perf_counter() - began)
        self.apply(decided)
        if number in self.waiting:
            self.timers.call_later(self.warn_after, lambda: self._report_wait(number))
            self._report_contention()

    def request(self, number: int) -> Request | None:
        """Return a request that waits or has its lease; None if it has ended."""
        return self._requests.get(number)

    def restore(self, number: int, requester: Requester, token: Any, demand: Demand) -> None:
        """Enter a lease kept by an earlier head; the scheduler gets it with its node."""
        now = self.timers.time()
        self._requests[number] = Request(number, requester, token, demand, now, time.time())

    def withdraw(self, number: int) -> None:
        """Drop a request that waits, or a lease that was granted and not begun."""
        if self._requests.pop(number, None) is None:
            return
        self.waiting.pop(number, None)
        self.apply(self.scheduler.cancel(number, self.timers.time()))
        self.release(number)

    def release(self, number: int) -> None:
        """Free what a lease held; unknown numbers have no effect."""
        self._requests.pop(number, None)
        self.apply(self.scheduler.release(number, self.timers.time()))
        for hook in self.on_released:
            hook()

    def set_blocked(self, number: int, blocked: bool, leaving: bool = False) -> None:
        """Record that a lease's task waits for others, or continues.

        ``leaving``: its worker has done its work, and needs no more CPU until it exits.
        """
        if leaving:
            self.apply(self.scheduler.empty_lease(number, self.timers.time()))
        elif blocked:
            self.apply(self.scheduler.release_cpu(number, self.timers.time()))
        else:
            self.scheduler.take_cpu(number)

    # --- nodes and groups ----------------------------------------------------------
    def decide(self, change: Callable[..., Decisions], *what: Any, **how: Any) -> None:
        """Carry out what a change of the scheduler leads to, such as ``scheduler.remove_node``."""
        self.apply(change(*what, now=self.timers.time(), **how))

    def create_group(self, state: GroupPlacement, requester: GroupRequester) -> None:
        now = self.timers.time()
        self._groups = requester
        self.waiting_groups[state.group_id] = now
        self.apply(self.scheduler.create_group(state, now))
        if state.group_id in self.waiting_groups:
            reason = self.scheduler.explain_group(state.group_id)
            if reason is not None and reason.infeasible:
                self._report_group(state.group_id)
            else:
                self.timers.call_later(self.warn_after, lambda: self._report_group(state.group_id))
            self._report_contention()

    def group_is_placed(self, group_id: bytes) -> None:
        """Stop waiting for a group whose bundles were all reported by nodes."""
        self.waiting_groups.pop(group_id, None)

    def remove_group(self, group_id: bytes) -> None:
        self.waiting_groups.pop(group_id, None)
        self.apply(self.scheduler.remove_group(group_id, self.timers.time()))

    # --- carrying out --------------------------------------------------------------
    def apply(self, decisions: Decisions) -> None:
        """Notify the requesters of decisions; the effects of that are carried out next."""
        self._todo.append(decisions)
        if self._busy:
            return
        self._busy = True
        try:
            while self._todo:
                self._carry_out(self._todo.popleft())
        finally:
            self._busy = False
        self._arm_deadline()

    def _carry_out(self, decisions: Decisions) -> None:
        for number in decisions.lost:
            request = self._requests.pop(number, None)
            if request is not None:
                _notify(request, request.requester.lost)
        for number in decisions.to_end:
            request = self._requests.get(number)
            if request is not None:
                _notify(request, request.requester.must_end)
        for number, reason in decisions.failures:
            request = self._requests.pop(number, None)
            if request is not None:
                self.waiting.pop(request.number, None)
                _notify(request, request.requester.refused, reason)
        for number, allocation in decisions.grants:
            request = self._requests.get(number)
            if request is not None:
                self.waiting.pop(request.number, None)
                _notify(request, request.requester.granted, allocation)
        if decisions.grants and self.waiting:
            self._report_contention()
        for group_id in decisions.placed:
            self.waiting_groups.pop(group_id, None)
            self._groups.placed(group_id)
        for number, _ in decisions.infeasible:
            self._report_wait(number)

    # --- waiting -------------------------------------------------------------------
    def _arm_deadline(self) -> None:
        if self._deadline_armed:
            return  # whatever came since then is due later
        due = self.scheduler.next_deadline()
        if due is not None:
            self._deadline_armed = True
            self.timers.call_later(max(0.0, due - self.timers.time()), self._advance)

    def _advance(self) -> None:
        self._deadline_armed = False
        self.apply(self.scheduler.advance(self.timers.time()))
        self._report_contention()

    def _report_contention(self) -> None:
        for hook in self.on_contention:
            hook()

    def _report_wait(self, number: int) -> None:
        request = self.waiting.get(number)
        if request is not None:
            job_id = request.requester.describe(request.token).job_id
            self._on_wait(job_id, len(self.waiting) + len(self.waiting_groups))

    def _report_group(self, id: bytes) -> None:
        if id in self.waiting_groups:
            waiting = len(self.waiting) + len(self.waiting_groups)
            self._on_wait(self._groups.job_of(id), waiting)


def _notify(request: Request, decision: Callable[..., None], *what: object) -> None:
    """Call a requester; if it fails, the others still receive their decisions."""
    try:
        decision(request.token, request.number, *what)
    except Exception:
        logger.exception("carrying out the decision on request %d failed", request.number)
