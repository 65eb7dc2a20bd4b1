"""Asks clients to give leases back that others wait for.

Responsible for fairness and for bounded work; which leases make room is found by
``revocation.py``. A client finishes the task that runs before it gives a lease back.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING

from miniray.head.allocations import lease_id, lease_number
from miniray.head.leases import LeaseGroup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.head.clients import ClientDirectory
    from miniray.head.grants import GrantTable, Request, Timers
    from miniray.head.leases import TaskLease, TaskLeases

#: How long a client has a lease for itself, in seconds.
QUANTUM = 0.010
#: Waiting requests that are looked at in one round, in order of arrival.
_MAX_SCANNED = 512
#: Shapes for which nothing is found before a round ends.
_MAX_HOPELESS = 8
#: Leases that are looked at in one round.
_MAX_LEASES = 2048


def may_ask(held: int, by_waiter: int) -> bool:
    """Whether a group with ``held`` leases should give one to a waiter with ``by_waiter``.

    Ends with equal shares. A waiter without any takes the only one too, so that
    groups take turns where there are fewer leases than groups.
    """
    return by_waiter == 0 or held > by_waiter + 1


class Revocations:
    """One timer that looks for leases to ask back while requests wait."""

    def __init__(
        self, grants: GrantTable, leases: TaskLeases, clients: ClientDirectory, timers: Timers
    ) -> None:
        self._grants = grants
        self._leases = leases
        self._clients = clients
        self._timers = timers
        self._armed = False
        #: Leases that were asked back and are not over, by the request they are for.
        self._for: dict[int, set[int]] = {}
        grants.on_contention = self.arm

    def arm(self) -> None:
        """Look for leases soon."""
        if not self._armed:
            self._armed = True
            self._timers.call_later(QUANTUM, self._look)

    def _look(self) -> None:
        self._armed = False
        self._forget_done()
        waiting = self._grants.waiting
        if not waiting or not self._leases.leases:
            return
        shares = self._shares()
        too_young = False
        hopeless: set[object] = set()
        for request in list(itertools.islice(waiting.values(), _MAX_SCANNED)):
            waiter = request.token if isinstance(request.token, LeaseGroup) else None
            shape = (request.demand, waiter)
            if request.number in self._for or shape in hopeless:
                continue
            offers, young = self._offers(request, shares)
            too_young = too_young or young
            found = self._grants.scheduler.revocation_candidates(lease_id(request.number), offers)
            if found:
                self._ask(request, [lease_number(id) for id in found], shares)
            else:
                hopeless.add(shape)
                if len(hopeless) == _MAX_HOPELESS:
                    break
        if too_young:
            self.arm()

    def _forget_done(self) -> None:
        """Requests that are served, and those whose leases came back without serving them."""
        living = self._leases.leases
        for number, asked in list(self._for.items()):
            asked.intersection_update(living)
            if not asked or number not in self._grants.waiting:
                del self._for[number]

    def _shares(self) -> collections.Counter[LeaseGroup]:
        """Leases per group, as they will be when what was asked back has moved."""
        shares: collections.Counter[LeaseGroup] = collections.Counter()
        for lease in self._leases.leases.values():
            if not lease.revoked and not lease.returned:
                shares[lease.group] += 1
        for number in self._for:
            request = self._grants.waiting.get(number)
            if request is not None and isinstance(request.token, LeaseGroup):
                shares[request.token] += 1
        return shares

    def _offers(
        self, request: Request, shares: Mapping[LeaseGroup, int]
    ) -> tuple[list[bytes], bool]:
        """Leases that may be asked back for a request, and whether some will be later."""
        waiter = request.token
        had = shares[waiter] if isinstance(waiter, LeaseGroup) else 0
        granted_before = self._timers.time() - QUANTUM
        offers: list[bytes] = []
        young = False
        for lease in self._leases.leases.values():
            if not self._is_offered(lease, waiter, had, shares):
                continue
            if lease.granted > granted_before:
                young = True
                continue
            offers.append(lease_id(lease.number))
            if len(offers) == _MAX_LEASES:
                break
        return offers, young

    @staticmethod
    def _is_offered(
        lease: TaskLease, waiter: object, had: int, shares: Mapping[LeaseGroup, int]
    ) -> bool:
        if lease.revoked or lease.returned or lease.ended or not lease.process_id:
            return False
        return lease.group is not waiter and may_ask(shares[lease.group], had)

    def _ask(
        self, request: Request, numbers: list[int], shares: collections.Counter[LeaseGroup]
    ) -> None:
        self._for[request.number] = set(numbers)
        if isinstance(request.token, LeaseGroup):
            shares[request.token] += 1
        for number in numbers:
            lease = self._leases.leases[number]
            lease.revoked = True
            shares[lease.group] -= 1
            self._clients.push(lease.group.client_id, "lease_revoked", number, lease.group.id)
