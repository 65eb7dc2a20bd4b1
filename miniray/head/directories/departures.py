"""Workers that end by rule and wait for calls which, in turn, wait for what these workers hold.

A worker keeps its devices until its process is gone, and a process that ends by rule first
waits for the calls that it has made. Where these need its devices, none of it would ever
end: the demand that can never be served is refused, with the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from miniray.head.scheduling.allocations import lease_id
from miniray.head.scheduling.reasons import Reason, ReasonKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.head.directories.actors import ActorDirectory
    from miniray.head.directories.clients import ClientDirectory, ProcessExit
    from miniray.head.directories.grants import GrantTable, Request, Timers
    from miniray.head.directories.leases import TaskLeases

#: Waiting requests that are looked at in one round, in order of arrival.
_MAX_SCANNED = 512


@dataclasses.dataclass(slots=True)
class _Departure:
    """A process that ends by rule and waits."""

    process_id: bytes
    lease: int
    #: Processes that run its calls.
    callees: list[bytes]
    since: float
    #: Until then it is expected to end, because a call that it waited for was refused.
    yields_until: float = 0.0


class Departures:
    """The processes that end by rule and wait for calls of theirs."""

    def __init__(
        self,
        grants: GrantTable,
        leases: TaskLeases,
        actors: ActorDirectory,
        clients: ClientDirectory,
        timers: Timers,
        *,
        patience: float,
    ) -> None:
        """Watch over a table of grants.

        Args:
            grants: what waits.
            leases: of tasks; others than those of the departing will end.
            actors: who made them, and where they live.
            clients: who is there.
            timers: the event loop.
            patience: seconds after which nothing is expected to change: an actor might have
                ended meanwhile, or a node joined.
        """
        self._grants = grants
        self._leases = leases
        self._actors = actors
        self._patience = patience
        self._timers = timers
        self._departing: dict[bytes, _Departure] = {}
        self._armed = False
        grants.on_contention.append(self._arm)
        clients.on_ended.append(self._ended)

    def began(self, process_id: bytes, lease: int, callees: list[bytes]) -> None:
        """A process has ended its work, and waits for calls that these processes run."""
        known = self._departing.get(process_id)
        since = self._timers.time() if known is None else known.since
        self._departing[process_id] = _Departure(process_id, lease, callees, since)
        self._arm()

    def waits_for(self, process_id: bytes, other: bytes) -> bool:
        """Whether a process waits for what another one does, directly or through others."""
        return process_id in _ancestors(other, self._callers())

    def _ended(self, process_id: bytes, _how: ProcessExit) -> None:
        self._departing.pop(process_id, None)

    def _arm(self) -> None:
        if self._departing and self._grants.waiting and not self._armed:
            self._armed = True
            oldest = min(departure.since for departure in self._departing.values())
            now = self._timers.time()
            # One that had its time is looked at soon: calls of its may come one by one.
            delay = max(oldest + self._patience - now, self._patience / 10)
            self._timers.call_later(delay, self._look)

    def _look(self) -> None:
        """Refuse what waits for a worker that waits for it."""
        self._armed = False
        callers = self._callers()
        again = False
        for request in list(itertools.islice(self._grants.waiting.values(), _MAX_SCANNED)):
            departure, name = self._in_the_way(request, callers)
            if departure is None:
                continue
            if self._timers.time() - departure.since < self._patience:
                again = True
            elif self._moves(request, departure):
                again = again or self._timers.time() < self._last_yields()
            else:
                self._refuse(request, departure, name)
        if again:
            self._arm()

    def _callers(self) -> dict[bytes, list[bytes]]:
        """Who may wait for a process: those whose task, method or actor it runs."""
        callers: dict[bytes, list[bytes]] = {}
        for lease in self._leases.leases.values():
            if lease.process_id:
                callers.setdefault(lease.process_id, []).append(lease.group.client_id)
        for actor in self._actors.all():
            if actor.process_id:
                callers.setdefault(actor.process_id, []).append(actor.owner)
        for departure in self._departing.values():
            for callee in departure.callees:
                callers.setdefault(callee, []).append(departure.process_id)
        return callers

    def _in_the_way(
        self, request: Request, callers: dict[bytes, list[bytes]]
    ) -> tuple[_Departure | None, str]:
        """Who waits, directly or through others, for a request and holds what it needs, if any.

        With it comes the name of a resource. (What a process holds of CPU it gave back.)
        """
        wanted = {name for name, _ in request.demand.placing} - {"CPU"}
        if not wanted:
            return None, ""
        asker = request.requester.describe(request.token).process_id
        for process_id in _ancestors(asker, callers):
            departure = self._departing.get(process_id)
            lease = None if departure is None else self._grants.lease(departure.lease)
            common = set() if lease is None else wanted & lease.allocation.names()
            if common:
                return departure, min(common)
        return None, ""

    def _last_yields(self) -> float:
        return max(departure.yields_until for departure in self._departing.values())

    def _moves(self, request: Request, in_the_way: _Departure) -> bool:
        """Whether there will be room when all tasks have ended, those that depart left out."""
        now = self._timers.time()
        departing = self._departing.values()
        stay = {d.lease for d in departing if d is in_the_way or d.yields_until <= now}
        ending = [lease_id(n) for n in self._leases.leases if n not in stay]
        return self._grants.scheduler.fits_after(lease_id(request.number), ending)

    def _refuse(self, request: Request, departure: _Departure, name: str) -> None:
        holder = self._grants.request(departure.lease)
        what = holder.requester.describe(holder.token).name if holder is not None else "its caller"
        needed = dict(request.demand.placing)[name]
        reason = Reason(ReasonKind.HELD_BY_CALLER, name, needed, detail=what)
        departure.yields_until = self._timers.time() + self._patience
        self._grants.refuse(request.number, reason)


def _ancestors(process_id: bytes, callers: dict[bytes, list[bytes]]) -> Iterator[bytes]:
    """A process and those that may wait for it, directly or not."""
    seen = {process_id}
    more = [process_id]
    while more:
        one = more.pop()
        yield one
        fresh = [each for each in dict.fromkeys(callers.get(one, ())) if each not in seen]
        seen.update(fresh)
        more += fresh
