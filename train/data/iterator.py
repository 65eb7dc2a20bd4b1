"""``DataIterator``: reads a train loop's part of a dataset."""

from __future__ import annotations

import dataclasses
import time
import zlib
from typing import TYPE_CHECKING, Any

from miniray.common.read_ahead import read_ahead
from miniray.train.config.checks import is_whole
from miniray.train.data.devices import move, moved_ahead, own_devices
from miniray.train.data.order import (
    Position,
    plan_batches,
    position_of,
    size_of,
    state_of,
)
from miniray.train.data.sources import LocalShuffle, Source, StreamReader, formatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from miniray.train.data.order import BatchPlan
    from miniray.train.data.sources import Reader, StreamSource

#: Members of Ray's iterator beside batches, and what to do instead.
_OF_RAY = {
    "get_context": "each worker reads its part by itself, and nothing is configured for it",
    "iter_jax_batches": "iter_batches() gives NumPy arrays, which JAX takes",
    "iter_rows": 'go through iter_batches(batch_format="pyarrow") and to_pylist() of each batch',
    "iter_tf_batches": "iter_batches() gives NumPy arrays, which TensorFlow takes",
    "materialize": "collect what iter_batches() gives",
    "schema": 'it is that of a batch of iter_batches(batch_format="pyarrow")',
    "stats": "profile the train loop",
    "to_tf": "iter_batches() gives NumPy arrays, which TensorFlow takes",
    "to_torch": "iter_torch_batches() gives tensors",
}


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """How a train loop wants its batches.

    Attributes:
        prefetch_batches: Batches that are made ahead.
        drop_last: Leave out what does not fill a batch.
        local_shuffle: Buffer size and seed of a local shuffle, or None.
        make: Makes a batch of rows.
        device: Where tensors go, or None: batches stay as they are.
    """

    batch_size: int
    prefetch_batches: int
    drop_last: bool
    local_shuffle: tuple[int, int] | None
    make: Callable[[Any], Any]
    device: Any = None

    def checked(self, caller: str) -> BatchSpec:
        """Return this spec; ValueError if a number makes no sense."""
        _check_whole(caller, "batch_size", self.batch_size, 1)
        _check_whole(caller, "prefetch_batches", self.prefetch_batches, 0)
        return self


def _check_whole(caller: str, name: str, value: Any, least: int) -> None:
    if not is_whole(value, least=least):
        raise ValueError(f"{caller}({name}={value!r}) must be a whole number, {least} or more.")


class DataIterator:
    """A rank's part of a dataset. Get one with ``get_dataset_shard()``.

    Each pass over it is an epoch, with an order of its own if the dataset is shuffled. Every rank
    gets the same number of batches. ``state_dict()`` holds how far the passes have come.

    Args:
        rank: Which part.
        world_size: Number of parts.
        seed: From which the orders of epochs are drawn; None keeps the data's own.
        readers: Ranks that read the dataset, among which pools are divided: all, also where each
            reads all parts. Default: ``world_size``.
    """

    def __init__(
        self,
        name: str,
        source: Source | StreamSource,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = 0,
        readers: int | None = None,
    ) -> None:
        self._name = name
        self._source = source
        self._rank = rank
        self._world_size = world_size
        self._readers = readers or world_size
        self._seed = None if seed is None else seed + zlib.crc32(name.encode())
        self._position = self._start_of(0)
        self._reader: Reader | None = None  # what no pass uses now
        self._prepare()
        #: Seconds that the train loop has waited for batches, and rows that it was given.
        self.waited, self.rows = 0.0, 0

    if not TYPE_CHECKING:  # else a type checker takes any name for one that is there

        def __getattr__(self, name):
            instead = f": {_OF_RAY[name]}" if name in _OF_RAY else ""
            raise AttributeError(f"a DataIterator has no {name!r}{instead}", name=name, obj=self)

    def iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
    ) -> BatchIterable:
        """Return batches for any framework. Each iteration over what this returns is an epoch.

        Args:
            prefetch_batches: Batches that a thread makes ahead; 0: none, and no thread.
            batch_size: Rows of a batch. The last one may have fewer, or one more.
            batch_format: ``"numpy"`` (the default): a dictionary of arrays by column, or for
                items of a PyTorch dataset arrays in the structure of an item. ``"pandas"``: a
                DataFrame. ``"pyarrow"`` or None: a table.
            drop_last: Leave out rows that do not fill a batch on every rank.
            local_shuffle_buffer_size: Mix the rows within windows of this many; they
                are in memory at once. For Parquet, whose row groups are shuffled as a whole, and
                for iterable datasets, which have no other shuffle.
            local_shuffle_seed: From which that order is drawn. Default: the seed of the dataset.

        Raises:
            ValueError: A value makes no sense, or this data has no such format. In a pass over an
                iterable dataset: it gave less items than there are workers.
        """
        make = formatter(batch_format, tabular=self._source.tabular)
        local = self._local_shuffle("iter_batches", local_shuffle_buffer_size, local_shuffle_seed)
        spec = BatchSpec(batch_size, prefetch_batches, drop_last, local, make)
        return BatchIterable(self, spec.checked("iter_batches"))

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int = 256,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
    ) -> BatchIterable:
        """Return batches of PyTorch tensors. Each iteration over what this returns is an epoch.

        A batch is a dictionary of tensors by column. Items of a PyTorch dataset are put together
        as ``torch.utils.data.default_collate`` does. Arguments that are not named below are those
        of ``iter_batches``.

        Args:
            dtypes: Type of the tensors: one for all columns, or one for each by name. Not with
                ``collate_fn``.
            device: Where the tensors go; ``"auto"`` is the worker's device. A GPU gets the next
                batch while this one is used.
            collate_fn: Makes a batch: of a dictionary of NumPy arrays by column, of what a class of
                ``miniray.data.collate_fn`` is named after, or for a PyTorch dataset of a list of
                items.
            pin_memory: Put tensors into pinned memory, which a GPU can read by itself.

        Raises:
            ValueError: A value makes no sense.
        """
        if dtypes is not None and (collate_fn is not None or not self._source.tabular):
            raise ValueError(
                "iter_torch_batches(dtypes=...) is for columns of tables that are not collated by "
                "a collate_fn; convert the tensors there."
            )
        caller = "iter_torch_batches"
        local = self._local_shuffle(caller, local_shuffle_buffer_size, local_shuffle_seed)
        make = self._collate(dtypes, collate_fn, pin_memory=pin_memory)
        spec = BatchSpec(batch_size, prefetch_batches, drop_last, local, make, _device(device))
        return BatchIterable(self, spec.checked(caller))

    def state_dict(self) -> dict[str, Any]:
        """Return how far the newest pass has come, as plain values to be saved with a checkpoint.

        A batch counts as seen when the loop gets it. After ``load_state_dict`` the next pass gives
        exactly the rows of this epoch that were not seen; an epoch that was read to its end is
        followed by the next one.
        """
        return state_of(self._position, self._rank, self._identity)

    def progress(self) -> dict[str, Any]:
        """Return how far this rank is, as JSON values: ``of`` rows of its part of this epoch."""
        position = self._position
        own = size_of(position.own(self._rank)) if isinstance(self._source, Source) else None
        told = {"epoch": position.epoch, "taken": position.taken, "of": own}
        return {**told, "rows": self.rows, "waited": round(self.waited, 3)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another iterator over the same data was.

        With the same number of workers each may load its own state, or all that of rank 0. With
        another number all of them load that of rank 0, and unseen rows are split again: all
        ranks must have seen as many batches as rank 0 when it was saved. If it is less than one
        row for each worker then, some rows are given to several, so that each has a batch.

        Raises:
            ValueError: The state is malformed, of other data or of another seed, or one within an
                epoch with a local shuffle of another number of workers.
        """
        self._position = position_of(state, self._identity, self._world_size)
        self._prepare()

    @property
    def _identity(self) -> dict[str, Any]:
        identity = {"name": self._name, "rows": None, "seed": self._seed}
        if isinstance(self._source, Source):
            identity["rows"] = self._source.num_rows
            if self._seed is not None:  # the order of an epoch is one of blocks
                sizes = map(int, self._source.block_sizes)
                identity["blocks"] = zlib.crc32(repr(list(sizes)).encode())
        return identity

    def _start_of(self, epoch: int) -> Position:
        return Position(epoch, [(0, self._source.num_rows)], self._world_size)

    def _collate(
        self, dtypes: Any, collate_fn: Callable[[Any], Any] | None, *, pin_memory: bool
    ) -> Callable[[Any], Any]:
        from miniray.data.collate_fn import batch_maker

        if not self._source.tabular:
            from torch.utils.data import default_collate

            return batch_maker(None, None, collate_fn or default_collate, pin_memory=pin_memory)

        from miniray.data.blocks import table_to_batch

        kind = getattr(collate_fn, "batch_format", "numpy")
        make = batch_maker(dtypes, None, collate_fn, pin_memory=pin_memory)
        return lambda rows: make(table_to_batch(rows, kind))

    def _local_shuffle(
        self, caller: str, size: int | None, seed: int | None
    ) -> tuple[int, int] | None:
        """Return buffer size and seed of a local shuffle, or None."""
        if seed is not None:
            _check_whole(caller, "local_shuffle_seed", seed, 0)
        if size is None:
            return None
        _check_whole(caller, "local_shuffle_buffer_size", size, 1)
        return size, (self._seed or 0) if seed is None else seed

    # --- passes, for BatchIterable ------------------------------------------------------

    def _prepare(self) -> None:
        """Start the tasks for the first rows of the next pass, where tasks make them."""
        self._reader = self._new_reader()
        if self._reader is not None:
            position = self._position
            self._reader.prepare(position.epoch, position.own(self._rank), position.taken)

    def _new_reader(self) -> Reader | None:
        if not isinstance(self._source, Source):
            return None
        whole = self._start_of(0).own(self._rank)
        return self._source.passes(self._seed, whole, self._readers)

    def _taken(self) -> Reader | None:
        """Return what was prepared for the next pass, to one pass only."""
        reader, self._reader = self._reader, None
        return reader

    def _begin(self, spec: BatchSpec) -> Position:
        position = self._position
        if position.begun:
            position = self._start_of(position.epoch + 1)
        if position.taken and position.local_shuffle != spec.local_shuffle:
            raise ValueError(
                f"The state that was loaded is of a pass with the local shuffle "
                f"{position.local_shuffle} (buffer, seed), and this one has {spec.local_shuffle}. "
                f"They must be the same until the epoch is over."
            )
        position = dataclasses.replace(position, begun=True, local_shuffle=spec.local_shuffle)
        self._position = position
        return position

    def _end(self, position: Position) -> None:
        """Note that a pass was read to its end; no effect if another one has begun since."""
        if self._position is position:
            self._position = self._start_of(position.epoch + 1)

    def _plan(self, position: Position, spec: BatchSpec) -> BatchPlan | None:
        if not isinstance(self._source, Source):
            return None
        own = max(0, size_of(position.own(self._rank)) - position.taken)
        return plan_batches(own, position.least_left, spec.batch_size, drop_last=spec.drop_last)

    def _upcoming(self, spec: BatchSpec) -> BatchPlan | None:
        """Return the batches of the next pass; None if their number is not known."""
        position = self._position
        return self._plan(self._start_of(0) if position.begun else position, spec)

    def _rows(self, position: Position, spec: BatchSpec, prepared: Reader | None) -> Iterator[Any]:
        source, local = self._source, spec.local_shuffle
        if not isinstance(source, Source):
            items = source.items(position.epoch)
            yield from StreamReader(
                self._name, items, self._rank, position, spec.batch_size, spec.drop_last
            ).batches()
            return
        plan = self._plan(position, spec)
        assert plan is not None
        begin = position.taken
        part = prepared or self._new_reader()
        assert part is not None
        part.begin(position.epoch, position.own(self._rank), begin)
        reader = LocalShuffle(part, *local, position.epoch) if local else part
        for start, stop in plan.bounds():
            yield reader.read(begin + start, begin + stop)
        part.end()
        self._reader = part


@dataclasses.dataclass(frozen=True, eq=False)
class BatchIterable:
    """Batches of a ``DataIterator``; each ``iter()`` is a pass of its own over the next epoch.

    ``len()`` is the number of batches of the next pass, the same on every rank. Iterable datasets
    have none.
    """

    _iterator: DataIterator
    _spec: BatchSpec

    def __len__(self) -> int:
        plan = self._iterator._upcoming(self._spec)
        if plan is None:
            raise TypeError("An iterable dataset has no length.")
        return plan.count

    def __iter__(self) -> Iterator[Any]:
        iterator, spec = self._iterator, self._spec
        position = iterator._begin(spec)
        # Frozen, as the position moves while batches are made ahead of it.
        # What was prepared is taken here: passes side by side are read by threads of their own.
        rows = iterator._rows(dataclasses.replace(position), spec, iterator._taken())
        made = ((len(each), spec.make(each)) for each in rows)
        since = time.perf_counter()
        ahead = read_ahead(made, spec.prefetch_batches, "miniray-train-data")
        for size, batch in _on_device(ahead, spec.device):
            position.taken += size
            iterator.waited += time.perf_counter() - since
            iterator.rows += size
            yield batch
            since = time.perf_counter()
        iterator._end(position)


def _device(device: Any) -> Any:
    import torch

    if device != "auto":
        return torch.device(device) if device is not None else None
    return own_devices()[0]


def _on_device(batches: Iterator[Any], device: Any) -> Iterator[Any]:
    """Yield the batches, with their sizes, on a device: the next is copied while one is used."""
    if device is None:
        yield from batches
        return
    if device.type == "cuda":
        yield from moved_ahead(batches, device)
    else:
        for batch in batches:
            yield move(batch, device)
