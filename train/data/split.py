"""Who reads which rows of an epoch, and in how many batches. Pure.

An epoch's rows have positions in its order. What is to be read is a list of ranges of
positions, which is cut into one part for each rank.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Positions from the first up to, without, the second.
Range = tuple[int, int]


def size_of(ranges: Sequence[Range]) -> int:
    """How many positions there are in all."""
    return sum(stop - start for start, stop in ranges)


def part(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """The ranges without what comes before ``start`` and from ``stop`` on, counted over all."""
    found = []
    for low, high in ranges:
        first, last = low + max(0, start), min(high, low + stop)
        if first < last:
            found.append((first, last))
        start -= high - low
        stop -= high - low
    return found


def bounds(total: int, rank: int, world_size: int) -> Range:
    """Where a rank's part begins and ends; the first ranks get one more if it does not go up."""
    least, more = divmod(total, world_size)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


def split(ranges: Sequence[Range], world_size: int) -> list[list[Range]]:
    """One part for each rank, in order; their sizes differ by at most one."""
    total = size_of(ranges)
    return [part(ranges, *bounds(total, rank, world_size)) for rank in range(world_size)]


def left_over(ranges: Sequence[Range], world_size: int, taken: int) -> list[Range]:
    """What is left when every rank has read so many rows of its part."""
    parts = split(ranges, world_size)
    return [found for each in parts for found in part(each, taken, size_of(each))]


def enough_for(world_size: int, ranges: Sequence[Range]) -> list[Range]:
    """The ranges, with some positions again if there are some, but not one for each rank.

    A rank without a batch would leave the others in their next collective.
    """
    size = size_of(ranges)
    if size >= world_size or not size:
        return list(ranges)
    return part([*ranges] * world_size, 0, world_size)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How a rank's rows are cut into batches.

    Attributes:
        count: Number of batches, the same on every rank.
        size: Rows of all batches but the last.
        last: Rows of the last one.
    """

    count: int
    size: int
    last: int

    def bounds(self) -> Iterator[Range]:
        """Where each batch begins and ends, from 0."""
        for index in range(self.count):
            start = index * self.size
            yield start, start + (self.last if index == self.count - 1 else self.size)


def plan_batches(own: int, least: int, batch_size: int, *, drop_last: bool) -> BatchPlan:
    """The batches of a rank, as many as on every other rank.

    A rank with one batch more than the others would wait for ever in its next collective. So
    where one row more would be a batch of its own, it joins the last batch.

    Args:
        own: Rows of this rank.
        least: Rows of the rank that has least: ``own``, or one less.
        batch_size: Rows of a batch.
        drop_last: Leave out what does not fill a batch on every rank.
    """
    if drop_last:
        return BatchPlan(least // batch_size, batch_size, batch_size)
    count = -(-(least or own) // batch_size)
    return BatchPlan(count, batch_size, own - (count - 1) * batch_size)
