"""How an elastic group comes to more workers: it asks for their room and takes it at a checkpoint.

Whether to grow is the scaling policy's decision; ending and starting groups is
the controller's part.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miniray.train.base.policies import ScalingDecision, ScalingPolicy
    from miniray.train.controller.room import MoreRoom
    from miniray.train.controller.worker_group import WorkerGroup


class Growth:
    """What follows from the scaling policy while a group runs.

    Args:
        policy: Decides.
        interval: Seconds that a group runs at least before it asks for more room.
    """

    def __init__(self, policy: ScalingPolicy, interval: float) -> None:
        self._policy = policy
        self._interval = interval
        self._room: MoreRoom | None = None
        self._asking: asyncio.Task[None] | None = None
        self._size = 0
        self._decision: ScalingDecision | None = None

    def begin(self, group: WorkerGroup) -> None:
        """Ask for room beside a group that runs now, if the policy wants it."""
        self._size = group.size
        wanted = self._policy.wanted(group.size)
        if wanted > 0:
            self._room = group.more_room()
            self._asking = asyncio.create_task(self._ask(self._room, wanted))

    async def _ask(self, room: MoreRoom, wanted: int) -> None:
        await asyncio.sleep(self._interval)
        await room.collect(wanted)

    def at_checkpoint(self) -> bool:
        """Whether a larger group is to go on from the checkpoint that is complete now."""
        if self._room is None:
            return False
        if self._asking is not None and self._asking.done():
            self._asking.result()  # raises why there can be no more room
        if self._room.count:
            self._decision = self._policy.grow(self._size, self._room.count)
        return self._decision is not None

    def next_group(self) -> ScalingDecision:
        """The group to start."""
        decision, self._decision = self._decision, None
        return decision if decision is not None else self._policy.next_group()

    async def end(self) -> None:
        """Give the room back, for the next group to be placed in it."""
        asking, self._asking = self._asking, None
        room, self._room = self._room, None
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if room is not None:
            await asyncio.to_thread(room.give_back)
