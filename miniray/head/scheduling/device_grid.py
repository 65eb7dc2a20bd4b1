"""Devices that stand in a grid, of which a demand for several takes a block of neighbours.

Responsible for which blocks there are and which of the free ones is taken; what holds
for all devices is in ``devices.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.amounts import UNIT
from miniray.head.scheduling.devices import Devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from miniray.head.scheduling.devices import Aside, DeviceShares

#: Positions of devices, in their order.
Block = tuple[int, ...]


def aligned_blocks(ids: Sequence[str], size: int) -> tuple[Block, ...]:
    """The blocks of so many devices: those numbered from a multiple of the size on.

    The chips of a TPU host are numbered row by row, two in a row, so that such a run is a
    rectangle of the grid: 0,1 and 2,3 are its rows, 0 to 3 and 4 to 7 its squares. libtpu is
    given the numbers of a part and its shape, and serves rectangles only; JAX divides a host
    among processes in the same way (``jax/_src/test_multiprocess.py``).

    Args:
        ids: Device ids. One that is no number has no neighbours.
        size: Devices in a block; there is none of a size that is no power of two.
    """
    if size < 1 or size & (size - 1):
        return ()
    if size == 1:
        return tuple((position,) for position in range(len(ids)))
    at = {int(id): position for position, id in enumerate(ids) if id.isdecimal()}
    starts = sorted({number // size * size for number in at})
    runs = (range(start, start + size) for start in starts)
    return tuple(tuple(at[n] for n in run) for run in runs if all(n in at for n in run))


class DeviceGrid(Devices):
    """Devices of which several at once are taken as an aligned block.

    Of the free blocks that serve, the one is taken that breaks up least: whose surroundings
    are least free. So blocks that are given back merge again, as in a buddy allocator.
    """

    __slots__ = ("_blocks",)

    def __init__(self, shares: Iterable[tuple[str, int]], *, divisible: bool = True) -> None:
        """Start with everything free; see ``Devices``."""
        super().__init__(shares, divisible=divisible)
        #: Blocks by size, the small ones first.
        self._blocks: dict[int, tuple[Block, ...]] = {}
        size = 1
        while blocks := aligned_blocks(self.ids, size):
            self._blocks[size] = blocks
            size *= 2

    def takes(self, units: int) -> bool:
        """Whether a block can have this size at all."""
        count = units // UNIT
        return super().takes(units) and not count & (count - 1)

    def most_of(self, amounts: Sequence[int], units: int) -> int:
        """The largest whole block up to the wanted size, or what one device has."""
        if units < UNIT:
            return super().most_of(amounts, units)
        whole = [
            size
            for size, blocks in self._blocks.items()
            if size * UNIT <= units and any(_is_whole(amounts, block) for block in blocks)
        ]
        return max(whole, default=0) * UNIT

    def outline(self, aside: Aside | None = None) -> tuple[int, ...]:
        """What is free of each device: which of them are neighbours matters."""
        return tuple(self._beyond(aside))

    def soonest(self, units: int, later: Devices) -> DeviceShares:
        """The block to wait for: of those that will be whole, the freest now."""
        if units < UNIT:
            return super().soonest(units, later)
        blocks = [block for block in self._blocks[units // UNIT] if _is_whole(later.free, block)]
        freest = max(blocks, key=lambda block: sum(self.free[position] for position in block))
        return tuple((self.ids[position], UNIT) for position in freest)

    def copy(self) -> DeviceGrid:
        """An independent copy."""
        twin = super().copy()
        assert isinstance(twin, DeviceGrid)
        twin._blocks = self._blocks
        return twin

    def _whole(self, free: Sequence[int], count: int) -> Sequence[int]:
        whole = [block for block in self._blocks[count] if _is_whole(free, block)]
        return min(whole, key=lambda block: self._surroundings(free, block[0], count))

    def _surroundings(self, free: Sequence[int], position: int, count: int) -> int:
        """Size of the largest block around a position that is whole."""
        largest = count
        for size, blocks in self._blocks.items():
            if size > count and any(
                position in block and _is_whole(free, block) for block in blocks
            ):
                largest = size
        return largest


def _is_whole(amounts: Sequence[int], block: Block) -> bool:
    return all(amounts[position] == UNIT for position in block)
