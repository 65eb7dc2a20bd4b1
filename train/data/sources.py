"""``Source``: rows that can be read by number, block by block; ``StreamSource``: items in a row.

A source is made in the driver, pickled once, and opened by each rank. Which rows a
rank reads is decided elsewhere.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Rows(Protocol):
    """An open block."""

    def take(self, rows: Any) -> Any:
        """These rows, in this order: a table of Arrow, or a list of items.

        Args:
            rows: Numbers within the block: a range, or an array of integers.
        """


class Source(abc.ABC):
    """Data with a known number of rows."""

    #: Whether pieces are tables of Arrow; otherwise they are lists of items.
    tabular: bool = True

    @property
    @abc.abstractmethod
    def block_sizes(self) -> Sequence[int]:
        """Rows of each block: what is read at once. At least one block, none without rows."""

    @abc.abstractmethod
    def open_block(self, block: int) -> Rows:
        """Make the rows of a block available."""

    def combine(self, pieces: Sequence[Any]) -> Any:
        """Pieces of this source as one, in order."""
        if len(pieces) == 1:
            return pieces[0]
        if not self.tabular:
            return [item for piece in pieces for item in piece]
        import pyarrow

        return pyarrow.concat_tables(pieces)

    @property
    def num_rows(self) -> int:
        """Rows of all blocks."""
        return sum(self.block_sizes)


class StreamSource(abc.ABC):
    """Data that can only be read from the beginning, of unknown length."""

    @abc.abstractmethod
    def items(self, epoch: int) -> Iterator[Any]:
        """The items of an epoch."""
