"""Where a rank is in its data, in a form that can be saved and taken up again. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.train.data.split import bounds, enough_for, left_over, part, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.data.split import Range

_VERSION = 1
_KEYS = {"version", "dataset", "epoch", "ranges", "world_size", "taken", "local_shuffle"}

#: Stands for the end of data whose length is not known.
ENDLESS = 2**62


@dataclasses.dataclass
class Position:
    """How far a rank has come in an epoch.

    Attributes:
        epoch: Number of the epoch, from 0.
        ranges: Positions that were to be read when the epoch was split; all of them, or what an
            earlier group of another size has left.
        world_size: Over how many ranks they were split.
        taken: Rows of this rank's part that were handed out.
        local_shuffle: Buffer and seed of the local shuffle; None without one.
        begun: Whether a pass has begun here: the next one begins the next epoch.
    """

    epoch: int
    ranges: list[Range]
    world_size: int
    taken: int = 0
    local_shuffle: tuple[int, int] | None = None
    begun: bool = False

    def own(self, rank: int) -> list[Range]:
        """The part of a rank, from its beginning."""
        start, stop = bounds(size_of(self.ranges), rank, self.world_size)
        return part(self.ranges, start, stop)

    @property
    def least_left(self) -> int:
        """Rows left to the rank that has least, if every rank has taken as many as this one."""
        return max(0, size_of(self.ranges) // self.world_size - self.taken)

    @property
    def endless(self) -> bool:
        """Whether the length of the data is not known."""
        return self.ranges[-1:] != [] and self.ranges[-1][1] == ENDLESS

    @property
    def skip(self) -> int:
        """For data without a length: items of the epoch that all ranks have seen together."""
        return self.ranges[0][0] + self.taken * self.world_size


def state_of(position: Position, rank: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The position as plain values.

    Args:
        position: Where a rank is.
        rank: Which rank it is.
        identity: What the data must have in common with those that the state is given to.
    """
    taken = position.taken
    if not position.endless and taken >= size_of(position.own(rank)):
        # Who has read all of its part tells so to ranks with one row more too.
        taken = -(-size_of(position.ranges) // position.world_size)
    return {
        "version": _VERSION,
        "dataset": dict(identity),
        "epoch": position.epoch,
        "ranges": [list(each) for each in position.ranges],
        "world_size": position.world_size,
        "taken": taken,
        "local_shuffle": list(position.local_shuffle) if position.local_shuffle else None,
    }


def position_of(state: Mapping[str, Any], identity: Mapping[str, Any], world_size: int) -> Position:
    """The position that a state describes, for this many ranks.

    Raises:
        ValueError: It is no such state, or one of other data, or of a place that can't be taken
            up with this many ranks.
    """
    if not hasattr(state, "keys") or set(state.keys()) != _KEYS or state["version"] != _VERSION:
        raise ValueError(
            f"load_state_dict() got {state!r:.200}, which is not what state_dict() returns."
        )
    if state["dataset"] != dict(identity):
        raise ValueError(
            f"load_state_dict() got the state of other data: {state['dataset']}, while these are "
            f"{dict(identity)}. Rows and seed must be the same for the order to be."
        )
    local = tuple(state["local_shuffle"]) if state["local_shuffle"] else None
    position = Position(
        epoch=state["epoch"],
        ranges=[(start, stop) for start, stop in state["ranges"]],
        world_size=state["world_size"],
        taken=state["taken"],
        local_shuffle=local,
    )
    if position.world_size == world_size:
        return position
    if position.taken and local is not None:
        raise ValueError(
            f"The state was saved within an epoch that {position.world_size} workers read with a "
            f"local shuffle; it can't be taken up by {world_size}. Save it between epochs, or "
            f"leave local_shuffle_buffer_size out."
        )
    if position.endless:
        ranges = [(position.skip, ENDLESS)]
    else:
        left = left_over(position.ranges, position.world_size, position.taken)
        ranges = enough_for(world_size, left)
    return Position(position.epoch, ranges, world_size)
