"""What comes before a group's train loops: its resources, its processes, a storage for all.

How processes are started is in the group itself; what follows from a failure is the
controller's decision.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

from miniray.exceptions import ActorDiedError, DeathCause
from miniray.train.base.exceptions import (
    GroupStartError,
    PlacementTimeoutError,
    StorageNotSharedError,
    StorageUnusableError,
    WorkerFailure,
)
from miniray.train.base.ranks import listed
from miniray.train.controller.waits import end
from miniray.train.storage.storage import NOT_SHARED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miniray.train.controller.worker_group import WorkerGroup
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.controller_client import Carrier

    #: Runs a function that blocks in a thread.
    Blocking = Callable[..., Awaitable[Any]]

#: Seconds after which the user is told that the run waits for resources.
PLACEMENT_NOTE_AFTER = 5.0

#: Seconds between two checks whether workers that start have lost their bundles.
ROOM_CHECK = 3.0


async def place(
    group: WorkerGroup, limit: float | None, note: Callable[[str], None], blocking: Blocking
) -> None:
    """Wait for the resources of a group, for ``limit`` seconds; tell the user what is missing.

    Raises:
        PlacementTimeoutError: The resources were not free in time.
    """
    first = PLACEMENT_NOTE_AFTER if limit is None else min(limit, PLACEMENT_NOTE_AFTER)
    placed = asyncio.ensure_future(group.place())
    try:
        await asyncio.wait({placed}, timeout=first)
        if not placed.done():
            note(await blocking(group.why_waiting))
            await asyncio.wait({placed}, timeout=None if limit is None else limit - first)
        if not placed.done():
            why = await blocking(group.why_waiting)
            raise PlacementTimeoutError(f"The workers were not placed in {limit:g} s. {why}")
        await placed
    finally:
        await end(placed)


async def start(group: WorkerGroup, carrier: Carrier, attempt: int, blocking: Blocking) -> None:
    """Start the workers of a group that is placed, and connect them.

    Raises:
        GroupStartError: Some could not be started, or their node was lost before they were: they
            would wait until there is room for them again, which may be never.
    """
    starting = asyncio.ensure_future(group.start(carrier, attempt))
    try:
        while not starting.done():
            await asyncio.wait({starting}, timeout=ROOM_CHECK)
            lost = [] if starting.done() else await blocking(group.lost_bundles)
            if lost:
                died = WorkerFailure.of(ActorDiedError(DeathCause.NODE_LOST))
                raise GroupStartError(dict.fromkeys(lost, died))
        await starting
    finally:
        await end(starting)


async def check_shared(group: WorkerGroup, storage: RunStorage, blocking: Blocking) -> None:
    """Check that every rank can use the storage.

    Raises:
        StorageNotSharedError: Ranks do not see what is written to the storage here.
        StorageUnusableError: Nothing can be written to it where ranks are.
    """
    token = secrets.token_hex(8)
    await blocking(storage.write_probe, token)
    try:
        problems = await group.storage_problems(storage, token)
    finally:
        await blocking(storage.delete_probe, token)
    if not problems:
        return
    strangers = [rank for rank, problem in problems.items() if problem == NOT_SHARED]
    ranks = strangers or list(problems)
    nodes = sorted({group.infos[rank].address for rank in ranks})
    where = f"{listed(ranks)} on {', '.join(nodes)}"
    if strangers:
        raise StorageNotSharedError(
            f"The storage path {storage.storage_fs_path} is not shared by the machines of this "
            f"run: {where} did not find what the controller had written there. Set "
            f"RunConfig(storage_path=...) to a network folder or a URL that all machines reach."
        )
    raise StorageUnusableError(
        f"Nothing can be written to the storage path {storage.storage_fs_path} on some machines of "
        f"this run, so that their ranks could not store checkpoints. "
        f"{where[0].upper()}{where[1:]} got {problems[ranks[0]]}"
    )
