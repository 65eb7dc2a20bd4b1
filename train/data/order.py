"""The order of an epoch's rows, and how they are split over ranks and batches. Pure.

Blocks are permuted, and the rows in each. A permutation is computed entry by entry from a key, so
memory does not grow with the data. Ranges of positions in that order record how far a pass has
come.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


#: Up to this size the whole order is made at once.
_SMALL = 2**16
_ROUNDS = 6
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(values: Any) -> Any:
    """Scramble 64-bit numbers, each to another one.

    The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014).

    Args:
        values: An array of dtype uint64.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_key(*numbers: int) -> int:
    """Return a 64-bit key that each of these numbers, and their order, changes."""
    key: Any = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix(key + np.uint64(_GOLDEN) + np.full(1, number & _MASK, np.uint64))
    return int(key[0])


class Permutation:
    """An order of ``0 .. size - 1``.

    A small one is sorted by a hash. A large one is a Feistel network over the next power of 4,
    repeated on values outside (Black, Rogaway: Ciphers with Arbitrary Finite Domains,
    CT-RSA 2002).

    Args:
        size: How many numbers.
        key: Which order, as 64 bits.
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._order: Any = None
        if size <= _SMALL:
            hashes = mix(np.arange(size, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))
            self._order = np.argsort(hashes, kind="stable").astype(np.int64)
            return
        self._half = np.uint64(((size - 1).bit_length() + 1) // 2)
        self._mask = np.uint64(2 ** int(self._half) - 1)
        self._keys = [np.uint64(derive_key(key, step)) for step in range(_ROUNDS)]

    def take(self, positions: Any) -> Any:
        """Return the numbers at these positions, as an array of int64."""
        if self._order is not None:
            return self._order[positions]
        values = self._shuffle(np.asarray(positions, dtype=np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._shuffle(values[outside])
        return values.astype(np.int64)

    def _shuffle(self, values: Any) -> Any:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix(right + key) & self._mask)
        return (left << self._half) | right


#: Rows whose numbers are best computed together: for few at a time, each costs much more.
TOGETHER = 2**14

#: What the keys are for, so that they differ where their numbers do not.
_BLOCKS, _ROWS = 1, 2


class Span(NamedTuple):
    """Rows of a block that follow each other in an epoch's order."""

    #: Rows of the block.
    size: int
    start: int
    stop: int
    #: Of the block's permutation; None: its rows keep their order.
    key: int | None

    def numbers(self) -> Any:
        """Return the numbers of the rows: a range where they keep their order, or an array."""
        if self.key is None:
            return range(self.start, self.stop)
        return _permutation(self.size, self.key).take(np.arange(self.start, self.stop))

    def parts(self, most: int) -> Iterator[Span]:
        """Yield the same rows, ``most`` at a time."""
        for low in range(self.start, self.stop, most):
            yield self._replace(start=low, stop=min(low + most, self.stop))


#: Those of parts of a span, of which one is read after another.
_permutation = functools.lru_cache(maxsize=4)(Permutation)


class EpochOrder:
    """Rows of all blocks, one after another, by position.

    Args:
        seed: From which the order is drawn; None keeps blocks and rows as they are.
        epoch: Each epoch has an order of its own.
    """

    def __init__(self, sizes: Sequence[int], seed: int | None, epoch: int) -> None:
        self._seed = seed
        self._epoch = epoch
        self._blocks = np.arange(len(sizes))
        if seed is not None:
            key = derive_key(seed, _BLOCKS, epoch)
            self._blocks = Permutation(len(sizes), key).take(self._blocks)
        self._ends = np.cumsum(np.asarray(sizes, dtype=np.int64)[self._blocks])

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, Span]]:
        """Yield the blocks of these positions, in order, each with which of its rows are there."""
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[index])
            begin = int(self._ends[index - 1]) if index else 0
            upto = min(stop, end)
            block = int(self._blocks[index])
            if upto > start:
                key = None
                if self._seed is not None:
                    key = derive_key(self._seed, _ROWS, self._epoch, block)
                yield block, Span(end - begin, start - begin, upto - begin, key)
            start = upto
            index += 1


#: Positions from the first up to, without, the second.
Range = tuple[int, int]


def size_of(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def part(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """Return the ranges between positions ``start`` and ``stop``, counted over all ranges."""
    found = []
    for low, high in ranges:
        first, last = low + max(0, start), min(high, low + stop)
        if first < last:
            found.append((first, last))
        start -= high - low
        stop -= high - low
    return found


def bounds(total: int, rank: int, world_size: int) -> Range:
    """Return where a rank's part begins and ends; the first ranks get what is left over."""
    least, more = divmod(total, world_size)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


def split(ranges: Sequence[Range], world_size: int) -> list[list[Range]]:
    """Return one part for each rank, in order; their sizes differ by at most one."""
    total = size_of(ranges)
    return [part(ranges, *bounds(total, rank, world_size)) for rank in range(world_size)]


def left_over(ranges: Sequence[Range], world_size: int, taken: int) -> list[Range]:
    """Return what is left when every rank has read ``taken`` rows of its part."""
    parts = split(ranges, world_size)
    return [found for each in parts for found in part(each, taken, size_of(each))]


def enough_for(world_size: int, ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges, with some positions again if there are some, but not one for each rank.

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
        """Yield where each batch begins and ends, from 0."""
        for index in range(self.count):
            start = index * self.size
            yield start, start + (self.last if index == self.count - 1 else self.size)


def plan_batches(own: int, least: int, batch_size: int, *, drop_last: bool) -> BatchPlan:
    """Return the batches of a rank, as many as on every other rank.

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
        start, stop = bounds(size_of(self.ranges), rank, self.world_size)
        return part(self.ranges, start, stop)

    @property
    def least_left(self) -> int:
        """Rows left to the rank that has least, if every rank has taken as many as this one."""
        return max(0, size_of(self.ranges) // self.world_size - self.taken)

    @property
    def endless(self) -> bool:
        """Whether the length of the data is unknown."""
        return any(stop == ENDLESS for _, stop in self.ranges[-1:])

    @property
    def skip(self) -> int:
        """For data without a length: items of the epoch that all ranks have seen together."""
        return self.ranges[0][0] + self.taken * self.world_size


def state_of(position: Position, rank: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position as plain values."""
    taken = position.taken
    if not position.endless and taken >= size_of(position.own(rank)):
        # Ranks with one row more load this state too, so it says that all of their part is read.
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
    """Return the position that a state describes, for this many ranks.

    Raises:
        ValueError: The state is malformed, of other data, or of a place that can't be taken up with
            this many ranks.
    """
    if not hasattr(state, "keys") or set(state.keys()) != _KEYS or state["version"] != _VERSION:
        raise ValueError(
            f"load_state_dict() got {state!r:.200}, which is not what state_dict() returns."
        )
    if {**identity, **state["dataset"]} != dict(identity):  # older states lack blocks
        raise ValueError(
            f"load_state_dict() got the state of other data: {state['dataset']}, while these are "
            f"{dict(identity)}. Rows, seed and blocks must be the same for the order to be."
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
