"""The free capacity of a device resource, device by device.

Responsible for which devices an amount is taken from; not for the rest of a pool.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from miniray.common.amounts import UNIT, from_units

if TYPE_CHECKING:
    from collections.abc import Iterable


#: Devices held: (device id, fixed-point units).
DeviceShares = tuple[tuple[str, int], ...]
#: Fixed-point units of each device, in their order.
Aside = Sequence[int]


class Devices:
    """Free capacity of one device resource, device by device.

    A device out of service has its capacity taken off its free amount, so that
    it is never above 0 and no demand fits it; what is held there is still counted.
    """

    __slots__ = ("_positions", "capacity", "divisible", "free", "ids", "out")

    def __init__(self, shares: Iterable[tuple[str, int]], *, divisible: bool = True) -> None:
        pairs = tuple(shares)
        self.divisible = divisible
        self.ids = tuple(id for id, _ in pairs)
        self.capacity = [units for _, units in pairs]
        self.free = list(self.capacity)
        #: The reason of each device out of service.
        self.out: dict[str, str] = {}
        self._positions = {id: position for position, id in enumerate(self.ids)}
        if len(self._positions) != len(pairs):
            raise ValueError(f"device ids must differ, not {list(self.ids)}")

    def fits(self, units: int, aside: Aside | None = None) -> bool:
        """Return whether this amount can be taken now: of one device, or as whole devices."""
        return self.takes(units) and self.most_of(self._beyond(aside), units) >= units

    def most(self, aside: Aside | None = None) -> int:
        """Return the largest amount that can be taken now, without what must be left alone."""
        free = self._beyond(aside)
        return free.count(UNIT) * UNIT or max(free, default=0)

    def takes(self, units: int) -> bool:
        """Return whether devices like these can serve such an amount at all."""
        return units % UNIT == 0 or (units < UNIT and self.divisible)

    def could_fit(self, units: int, *, repaired: bool = False) -> bool:
        """Return whether this could be taken if all were idle and in service."""
        capacity = self.capacity if repaired else self.usable()
        return self.takes(units) and self.most_of(capacity, units) >= units

    def most_of(self, amounts: Sequence[int], units: int) -> int:
        """Return how much of these amounts could serve ``units``: one device's if below 1."""
        if units < UNIT:
            return max(amounts, default=0)
        return amounts.count(UNIT) * UNIT

    def usable(self) -> list[int]:
        """Return the capacity of each device; 0 of one out of service."""
        if not self.out:
            return self.capacity
        pairs = zip(self.ids, self.capacity, strict=True)
        return [0 if id in self.out else capacity for id, capacity in pairs]

    def copies(self, units: int, aside: Aside | None = None) -> int:
        """Return an upper bound of how many such amounts could be taken."""
        free = self._beyond(aside)
        if units < UNIT:
            return sum(have // units for have in free if have > 0)
        return free.count(UNIT) // (units // UNIT)

    def outline(self, aside: Aside | None = None) -> tuple[int, ...]:
        """Return the free amounts, ordered so that comparing them compares what fits."""
        return tuple(sorted(self._beyond(aside), reverse=True))

    def tightest(self, units: int) -> int:
        """Return the free amount of the fullest device that has this much; UNIT + 1 if none has."""
        return min([free for free in self.free if free >= units], default=UNIT + 1)

    def _beyond(self, aside: Aside | None) -> list[int]:
        if aside is None:
            return self.free
        return [free - left for free, left in zip(self.free, aside, strict=True)]

    def take(self, units: int, aside: Aside | None = None) -> DeviceShares:
        """Take an amount that fits: the fullest device that has it, or the first whole ones."""
        free = self._beyond(aside)
        if units < UNIT:
            position = free.index(min(have for have in free if have >= units))
            self.free[position] -= units
            return ((self.ids[position], units),)
        positions = self._whole(free, units // UNIT)
        for position in positions:
            self.free[position] = 0
        return tuple([(self.ids[position], UNIT) for position in positions])

    def _whole(self, free: Sequence[int], count: int) -> Sequence[int]:
        """Return the positions of ``count`` wholly free devices, which exist."""
        positions = []
        position = -1
        for _ in range(count):
            position = free.index(UNIT, position + 1)
            positions.append(position)
        return positions

    def soonest(self, units: int, later: Devices) -> DeviceShares:
        """Choose the devices to wait for: the freest now of all that will have this much.

        ``later`` are the same devices after the expected ends; the amount fits then.
        """
        will = [at for at, free in enumerate(later.free) if free >= min(units, UNIT)]
        will.sort(key=lambda position: -self.free[position])
        count, share = (1, units) if units < UNIT else (units // UNIT, UNIT)
        return tuple((self.ids[position], share) for position in sorted(will[:count]))

    def amounts(self, shares: DeviceShares) -> list[int]:
        amounts = [0] * len(self.ids)
        for id, units in shares:
            amounts[self._positions[id]] += units
        return amounts

    def take_exactly(self, shares: DeviceShares) -> None:
        """Take the named shares; ValueError if a device is unknown or lacks the capacity."""
        for id, units in shares:
            position = self._positions.get(id)
            if position is None:
                raise ValueError(f"there is no device {id!r}; the devices are {list(self.ids)}")
            room = self.free[position] + (self.capacity[position] if id in self.out else 0)
            if room < units:
                raise ValueError(
                    f"device {id!r} has {from_units(room):g} free, not {from_units(units):g}"
                )
        for id, units in shares:
            self.free[self._positions[id]] -= units

    def put(self, shares: DeviceShares) -> None:
        for id, units in shares:
            self.free[self._positions[id]] += units

    def set_in_service(self, id: str, in_service: bool, why: str = "") -> bool:
        """Take a device out of service, and say why, or back; return whether it changed."""
        position = self._positions.get(id)
        if position is None or (id not in self.out) == in_service:
            if id in self.out:
                self.out[id] = why
            return False
        if in_service:
            del self.out[id]
            self.free[position] += self.capacity[position]
        else:
            self.out[id] = why
            self.free[position] -= self.capacity[position]
        return True

    def available(self) -> int:
        return sum(free for free in self.free if free > 0)

    def copy(self) -> Devices:
        twin = type(self).__new__(type(self))
        twin.ids, twin.capacity, twin._positions = self.ids, self.capacity, self._positions
        twin.free, twin.out, twin.divisible = list(self.free), dict(self.out), self.divisible
        return twin


#: Positions of devices, in their order.
Block = tuple[int, ...]


def aligned_blocks(ids: Sequence[str], size: int) -> tuple[Block, ...]:
    """Return the blocks of this size: each begins at a number that is a multiple of the size.

    The chips of a TPU host are numbered row by row, two in a row, so that such a run is a
    rectangle of the grid: 0,1 and 2,3 are its rows, 0 to 3 and 4 to 7 its squares. libtpu is
    given the numbers of a part and its shape, and serves rectangles only; JAX divides a host
    among processes in the same way (``jax/_src/test_multiprocess.py``). An id that is no number
    has no neighbours; there is no block of a size that is no power of two.
    """
    if size < 1 or size & (size - 1):
        return ()
    if size == 1:
        return tuple((position,) for position in range(len(ids)))
    at = {int(id): position for position, id in enumerate(ids) if id.isdecimal()}
    starts = sorted({number // size * size for number in at})
    runs = (range(start, start + size) for start in starts)
    return tuple(tuple(at[n] for n in run) for run in runs if all(n in at for n in run))


@functools.lru_cache(maxsize=1024)
def _blocks_by_size(ids: tuple[str, ...]) -> dict[int, tuple[Block, ...]]:
    """Return the aligned blocks of these devices, the small ones first."""
    sizes = (1 << power for power in range(len(ids).bit_length()))
    return {size: blocks for size in sizes if (blocks := aligned_blocks(ids, size))}


class DeviceGrid(Devices):
    """Devices of which several at once are taken as an aligned block.

    Of the free blocks that serve, the one is taken that breaks up least: whose surroundings
    are least free. So blocks that are given back merge again, as in a buddy allocator.
    """

    __slots__ = ()

    @property
    def _blocks(self) -> dict[int, tuple[Block, ...]]:
        return _blocks_by_size(self.ids)

    def takes(self, units: int) -> bool:
        """Return whether a block can have this size at all."""
        count = units // UNIT
        return super().takes(units) and not count & (count - 1)

    def most_of(self, amounts: Sequence[int], units: int) -> int:
        """Return the largest whole block up to the wanted size, or what one device has."""
        if units < UNIT:
            return super().most_of(amounts, units)
        whole = [
            size
            for size, blocks in self._blocks.items()
            if size * UNIT <= units and any(_is_whole(amounts, block) for block in blocks)
        ]
        return max(whole, default=0) * UNIT

    def outline(self, aside: Aside | None = None) -> tuple[int, ...]:
        """Return the free amount of each device: which of them are neighbours matters."""
        return tuple(self._beyond(aside))

    def soonest(self, units: int, later: Devices) -> DeviceShares:
        """Choose the block to wait for: the freest now of all that will be whole."""
        if units < UNIT:
            return super().soonest(units, later)
        blocks = [block for block in self._blocks[units // UNIT] if _is_whole(later.free, block)]
        freest = max(blocks, key=lambda block: sum(self.free[position] for position in block))
        return tuple((self.ids[position], UNIT) for position in freest)

    def _whole(self, free: Sequence[int], count: int) -> Sequence[int]:
        whole = [block for block in self._blocks[count] if _is_whole(free, block)]
        return min(whole, key=lambda block: self._surroundings(free, block[0], count))

    def _surroundings(self, free: Sequence[int], position: int, count: int) -> int:
        """Return the size of the largest whole block around a position."""
        largest = count
        for size, blocks in self._blocks.items():
            if size > count and any(
                position in block and _is_whole(free, block) for block in blocks
            ):
                largest = size
        return largest


def _is_whole(amounts: Sequence[int], block: Block) -> bool:
    return all(amounts[position] == UNIT for position in block)
