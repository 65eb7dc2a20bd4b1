"""Leases requested back from clients, for requests that wait.

``scheduling/reservations.py`` decides which leases to request back.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING

from miniray.head.directories.leases import TaskLeaseGroup
from miniray.head.scheduling.groups import Group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.head.directories.grants import GrantTable, Request
    from miniray.head.directories.leases import TaskLease, TaskLeases
    from miniray.head.scheduling.resources import ResourcePool

    #: A group, the number of an actor's request, or a node on which capacity is reserved for a
    #: placement group.
    Waiter = TaskLeaseGroup | int | str


#: How long a client has a lease for itself, in seconds.
QUANTUM = 0.010
#: Seconds that a demand which needs several leases of others waits before they are requested: what
#: the first of them frees stands idle until the last one is back.
GATHER_AFTER = 1.0
#: Waiting requests that are examined in one round, in order of arrival.
_MAX_SCANNED = 512
#: Shapes without a result before a round ends.
_MAX_UNSERVED = 8
#: Times that leases are requested back for one waiter in one round.
_MAX_ASKS = 32
#: Leases that are examined to serve one request.
_MAX_LEASES = 2048


def may_ask(held: int, by_waiter: int) -> bool:
    """Return whether a group with ``held`` leases should give one to a waiter with ``by_waiter``.

    Ends with equal shares. A waiter without any takes the only one too, so that
    groups take turns where there are fewer leases than groups.
    """
    return by_waiter == 0 or held > by_waiter + 1


@dataclasses.dataclass(eq=False, repr=False)
class Revocations:
    """Requests leases back, by one timer, while requests wait."""

    _grants: GrantTable
    _leases: TaskLeases
    reserve_after: dataclasses.InitVar[float]

    def __post_init__(self, reserve_after: float) -> None:
        self._gather_after = min(GATHER_AFTER, reserve_after)
        #: Requests that are examined again when they have waited that long.
        self._too_early: set[int] = set()
        self._timers = self._grants.timers
        self._armed = False
        #: For each waiter the sets of open leases that were requested back.
        self._asked: dict[Waiter, list[set[int]]] = {}
        self._grants.on_contention.append(self.arm)
        self._leases.on_changed.append(self._changed)

    def arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._timers.call_later(QUANTUM, self._look)

    def _changed(self) -> None:
        """Schedule a round: a lease is over, or a client has one that can be requested back."""
        if self._asked or self._grants.waiting:
            self.arm()

    def _look(self) -> None:
        self._armed = False
        self._forget_done()
        if not self._leases.leases:
            return
        shares = self._shares()
        too_young = False
        unserved: set[object] = set()
        for request in self._first_waiting():
            group = _group_of(request)
            shape = (request.demand, group)
            if shape in unserved:
                continue
            found, young = self._serve(request, group, shares)
            too_young = too_young or young
            if not found:
                unserved.add(shape)
                if len(unserved) == _MAX_UNSERVED:
                    break
        self._requeue_groups_above_their_share()
        for pool in self._grants.scheduler.nodes.values():
            if pool.reservation is not None and isinstance(pool.reservation.owner, Group):
                self._make_room(pool, shares)
        if too_young:
            self.arm()

    def _first_waiting(self) -> list[Request]:
        return list(itertools.islice(self._grants.waiting.values(), _MAX_SCANNED))

    def _forget_done(self) -> None:
        living = self._leases.leases
        for waiter, asked in list(self._asked.items()):
            for numbers in asked:
                numbers.intersection_update(living)
            asked[:] = [numbers for numbers in asked if numbers]
            if not asked or (isinstance(waiter, int) and waiter not in self._grants.waiting):
                del self._asked[waiter]
            if isinstance(waiter, TaskLeaseGroup):
                self._leases.let_wait(waiter, len(asked))

    def _shares(self) -> collections.Counter[TaskLeaseGroup]:
        """Count the leases of each group as they will be once those requested back have moved."""
        shares: collections.Counter[TaskLeaseGroup] = collections.Counter()
        for lease in self._leases.leases.values():
            if not lease.revoked and not lease.returned:
                shares[lease.group] += 1
        for waiter, asked in self._asked.items():
            if isinstance(waiter, TaskLeaseGroup):
                shares[waiter] += len(asked)
        return shares

    def _requeue_groups_above_their_share(self) -> None:
        """Move groups that should give leases behind waiting groups with fewer."""
        waiting = self._first_waiting()
        groups = [_group_of(request) for request in waiting]
        shares = [0 if group is None else len(group.leases) for group in groups]
        since = list(self._grants.waiting_groups.values())
        fewest = min(shares, default=0) if not since else 0
        since += [r.since for r, share in zip(waiting, shares, strict=True) if share == fewest]
        last = max(since, default=0.0)
        for request, share in zip(waiting, shares, strict=True):
            if request.since <= last and share > fewest and may_ask(share, fewest):
                self._leases.wait_again(request.token)

    # --- requesting leases back --------------------------------------------------
    def _serve(
        self,
        request: Request,
        group: TaskLeaseGroup | None,
        shares: collections.Counter[TaskLeaseGroup],
    ) -> tuple[bool, bool]:
        """Request back what a waiter may have: (whether any was, whether more may be soon)."""
        waiter: Waiter = request.number if group is None else group
        wanted = 1 if group is None else group.total - len(group.leases)
        wanted -= len(self._asked.get(waiter, ()))
        asked = False
        young = False
        for _ in range(min(wanted, _MAX_ASKS)):
            offers, young = self._offers(group, shares)
            found = self._grants.scheduler.revocation_candidates(request.number, offers)
            if len(found) > 1:
                found = self._gather(request, offers, found)
            if not found:
                break
            asked = True
            several = len(found) > 1
            self._ask(waiter, found, shares)
            if several:
                break  # capacity is reserved for one request of a shape at a time
        if asked and group is not None:
            self._leases.let_wait(group, len(self._asked[group]))
        return asked, young

    def _gather(self, request: Request, offers: list[int], found: list[int]) -> list[int]:
        """Choose several leases for one request, once it has waited ``GATHER_AFTER`` seconds.

        Capacity that the first of them frees is reserved, as others would take it.
        """
        scheduler = self._grants.scheduler
        early = request.since + self._gather_after - self._timers.time()
        if early > 0:
            if request.number not in self._too_early:
                self._too_early.add(request.number)
                self._timers.call_later(early, lambda: self._look_again(request.number))
            return []
        if not scheduler.set_aside(request.number, found[0]):
            return []
        return scheduler.revocation_candidates(request.number, offers)

    def _look_again(self, number: int) -> None:
        self._too_early.discard(number)
        if number in self._grants.waiting:
            self.arm()

    def _make_room(self, pool: ResourcePool, shares: collections.Counter[TaskLeaseGroup]) -> None:
        """Request back the leases that occupy capacity reserved for a group on a node."""
        assert pool.reservation is not None
        wanted = {*pool.reservation.scalars, *pool.reservation.devices}
        trial = pool.copy()
        numbers: list[int] = []
        for number in sorted(pool.leases):
            if trial.has_room_set_aside():
                break
            lease = self._leases.leases.get(number)
            granted = self._grants.scheduler.lease(number)
            if lease is None or granted is None or not wanted & granted.allocation.names():
                continue
            trial.release(granted.allocation)
            if _is_held(lease):
                numbers.append(number)
        if numbers and trial.has_room_set_aside():
            self._ask(pool.node_id, numbers, shares)

    def _offers(
        self, waiter: TaskLeaseGroup | None, shares: Mapping[TaskLeaseGroup, int]
    ) -> tuple[list[int], bool]:
        """Return the leases that a waiter may be given, and whether there will be more soon."""
        had = shares[waiter] if waiter is not None else 0
        granted_before = self._timers.time() - QUANTUM
        offers: list[int] = []
        young = False
        for lease in self._leases.leases.values():
            if not _is_held(lease) or lease.group is waiter:
                continue
            if not may_ask(shares[lease.group], had):
                continue
            if lease.granted > granted_before:
                young = True
                continue
            offers.append(lease.number)
            if len(offers) == _MAX_LEASES:
                break
        return offers, young

    def _ask(
        self, waiter: Waiter, numbers: list[int], shares: collections.Counter[TaskLeaseGroup]
    ) -> None:
        self._asked.setdefault(waiter, []).append(set(numbers))
        if isinstance(waiter, TaskLeaseGroup):
            shares[waiter] += 1
        for number in numbers:
            lease = self._leases.leases[number]
            shares[lease.group] -= 1
            self._leases.ask_for(lease)


def _group_of(request: Request) -> TaskLeaseGroup | None:
    return request.token if isinstance(request.token, TaskLeaseGroup) else None


def _is_held(lease: TaskLease) -> bool:
    return bool(lease.process_id) and lease.may_be_asked_for
