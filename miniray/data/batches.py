"""Batches for readers of a dataset: rows, arrays, tables, tensors of PyTorch."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.common.absent import instead_of
from miniray.data.blocks import check_format, table_to_rows
from miniray.data.collate_fn import batch_maker
from miniray.data.tables import batched, concat, rebatched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def check_whole(caller: str, name: str, value: Any, least: int) -> int:
    """Return a whole number, of Python or NumPy, that is ``least`` or more; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{caller}({name}={value!r}) must be a whole number, {least} or more.")
    return int(value)


class Batches:
    """Batches of a dataset; they have no length.

    Each iteration over them executes the dataset again, beginning with ``iter()``.
    """

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


_ARRAYS = "iter_batches() gives NumPy arrays, which JAX and TensorFlow take"
#: Methods of Ray's datasets that are not here, and what to do instead.
ABSENT = {
    "iter_*": _ARRAYS,
    "mix": "union() and random_shuffle() mix datasets",
    "set_name": "a dataset is named after what its last stage does",
    "streaming_train_test_split": "train_test_split() reads nothing if rows are known by number",
    "summary": "aggregate() computes what is asked for",
    "to_tf": _ARRAYS,
    "to_torch": "iter_torch_batches() gives tensors",
    "to_*": "to_arrow_refs() gives the tables, and to_pandas() a DataFrame",
    "write_*": "write from a function given to map_batches()",
}


class Reading:
    """The methods of a dataset that read rows, each from the beginning."""

    if not TYPE_CHECKING:  # else a type checker takes any name for one that is there

        def __getattr__(self, name):
            told = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(instead_of(name, ABSENT) or told, name=name, obj=self)

    def _tables(self) -> Iterator[Any]:
        """Return the blocks; their tasks begin now."""
        raise NotImplementedError

    def iter_rows(self) -> Batches:
        """Return rows as dictionaries."""
        return Batches(lambda: (row for table in self._tables() for row in table_to_rows(table)))

    def iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
    ) -> Batches:
        """Return batches of rows.

        Args:
            prefetch_batches: Accepted as in Ray: tasks run ahead of the reader in any case.
            batch_size: Rows of a batch; None: as they come in blocks.
            batch_format: ``"numpy"`` (the default): a dictionary of arrays, which may be read-only
                views. ``"pandas"``: a DataFrame. ``"pyarrow"`` or None: a table.
            drop_last: Leave out rows that do not fill a batch.
            local_shuffle_buffer_size: Mix rows within windows of this many.
            local_shuffle_seed: From which that order is drawn.

        Raises:
            ValueError: A value makes no sense.
        """
        check_format("iter_batches", batch_format)
        numbers = (prefetch_batches, batch_size, local_shuffle_buffer_size, local_shuffle_seed)
        return Batches(self._batches("iter_batches", batch_format, numbers, drop_last=drop_last))

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Any = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
    ) -> Batches:
        """Return batches of PyTorch tensors, in a dictionary by column.

        Args:
            prefetch_batches: Accepted as in Ray: tasks run ahead of the reader in any case.
            batch_size: Rows of a batch; None: as they come in blocks.
            dtypes: Type of the tensors: one for all columns, or one for each by name.
            device: Where the tensors go; ``"auto"`` is the GPU if there is one.
            collate_fn: Makes a batch of a dictionary of NumPy arrays; one of
                ``miniray.data.collate_fn`` gets the format that it is named after.
            drop_last: Leave out rows that do not fill a batch.
            local_shuffle_buffer_size: Mix rows within windows of this many.
            local_shuffle_seed: From which that order is drawn.
            pin_memory: Put tensors into pinned memory.

        Raises:
            ValueError: A value makes no sense.
        """
        caller = "iter_torch_batches"
        if dtypes is not None and collate_fn is not None:
            raise ValueError(f"{caller}() takes dtypes or collate_fn, not both; convert there.")
        kind = getattr(collate_fn, "batch_format", "numpy")
        numbers = (prefetch_batches, batch_size, local_shuffle_buffer_size, local_shuffle_seed)
        batches = self._batches(caller, kind, numbers, drop_last=drop_last)

        def tensors() -> Iterator[Any]:
            found = batches()  # first: its tasks run while PyTorch is loaded
            return map(batch_maker(dtypes, device, collate_fn, pin_memory=pin_memory), found)

        return Batches(tensors)

    def _batches(
        self, caller: str, kind: str | None, numbers: Sequence[int | None], *, drop_last: bool
    ) -> Callable[[], Iterator[Any]]:
        """Return what begins to read batches."""
        prefetch, *others = numbers
        check_whole(caller, "prefetch_batches", prefetch, 0)
        least = {"batch_size": 1, "local_shuffle_buffer_size": 1, "local_shuffle_seed": 0}
        size, buffer, seed = (
            None if value is None else check_whole(caller, name, value, least[name])
            for name, value in zip(least, others, strict=True)
        )

        def batches() -> Iterator[Any]:
            found = self._tables()
            if buffer is not None:
                found = mixed(found, buffer, seed)
            cut = batched(found, size, drop_last=drop_last)
            return (rows.batch(kind) for rows in cut)

        return batches


def mixed(tables: Iterable[Any], window: int, seed: int | None) -> Iterator[Any]:
    """Yield tables whose rows are mixed within windows of ``window`` rows."""
    random = np.random.default_rng(seed)
    for table in rebatched(tables, window):
        order = random.permutation(table.num_rows)
        yield concat([table]).take(order)
