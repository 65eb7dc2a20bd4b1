"""Devices of a lease that a worker of before still has: that worker must be gone first.

Responsible for the wait, and for when it has to fail; who ends the worker is the pool.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from miniray.exceptions import ActorUnschedulableError, TaskUnschedulableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.node.workers.worker import NodeLease, Worker
    from miniray.node.workers.worker_events import WorkerEvents


class DeviceKeptError(RuntimeError):
    """A device that was granted stays with a process that could not be killed."""


async def wait_for_devices(
    devices: frozenset[tuple[str, str]],
    lease: NodeLease,
    workers: Iterable[Worker],
    events: WorkerEvents,
) -> None:
    """Wait until no worker of before has any of these devices.

    Args:
        devices: (resource, device) that the lease holds now.
        lease: what is to begin.
        workers: all workers of the node; those without a lease that have one of them are ending.
        events: tells who waits for whom.

    Raises:
        TaskUnschedulableError, ActorUnschedulableError: one of them does not end before what
            the lease is for has ended.
        DeviceKeptError: one of them does not end at all.
    """
    for worker in list(workers):
        if worker.lease is None and worker.devices & devices:
            await _wait_for(worker, lease, events)


async def _wait_for(worker: Worker, lease: NodeLease, events: WorkerEvents) -> None:
    """Wait until a worker is gone, unless that waits for a call which is to get this lease."""
    conditions = (worker.gone, worker.given_up, worker.awaits_calls)
    gone, given_up, waits = waiting = [asyncio.ensure_future(each.wait()) for each in conditions]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waits.done() and await events.waits_for(worker.process_id, lease.owner):
            kind = TaskUnschedulableError if lease.actor_id is None else ActorUnschedulableError
            name = lease.name or "This call"
            raise kind(
                f"{name} needs a device on which the process {worker.pid} of its caller has "
                f"worked. That one is to end, and first waits for the calls that it has made, "
                f"of which this is one or on which one waits. Use the result inside the task "
                f"that makes the call, or make it where that task is called."
            )
        await asyncio.wait((gone, given_up), return_when=asyncio.FIRST_COMPLETED)
        if not worker.gone.is_set():
            raise DeviceKeptError(
                f"the process {worker.pid}, which had worked on a device of this lease, could "
                f"not be killed"
            )
    finally:
        for future in waiting:
            future.cancel()
