"""Brings the datasets of a trainer to its ranks, and keeps each rank's iterators."""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

from miniray.api import get
from miniray.common.object_ref import ObjectRef
from miniray.train.data.config import DataConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.train.data.iterator import DataIterator


@dataclasses.dataclass(frozen=True)
class Datasets:
    """The datasets of a run, as they travel with its train loop."""

    sources: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: DataConfig = dataclasses.field(default_factory=DataConfig)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that reading the sources needs, the same ones for each rank."""
        return tuple(sorted({m for source in self.sources.values() for m in source.modules}))

    def published(self, put: Callable[[Any], Any]) -> Datasets:
        """Return the same with refs in place of the data, so that each node gets those only once.

        Raises:
            TypeError: A dataset can't be pickled.
        """
        refs = {}
        for name, source in self.sources.items():
            try:
                refs[name] = put(source)
            except (AttributeError, TypeError, pickle.PicklingError) as error:  # noqa: PERF203
                raise TypeError(
                    f"datasets[{name!r}] can't be sent to the workers, since it can't be pickled: "
                    f"{type(error).__name__}: {error}. Open files and connections when items are "
                    f"read, or make the dataset in the train loop."
                ) from error
        return Datasets(refs, self.config)


@dataclasses.dataclass
class Shards:
    """The iterators of one rank, each made when it is first asked for."""

    datasets: Datasets
    rank: int
    world_size: int
    _made: dict[str, DataIterator] = dataclasses.field(default_factory=dict)

    def get(self, name: str | None) -> DataIterator:
        """Return the iterator over this rank's part of a dataset; the same one each time.

        Raises:
            KeyError: There is no dataset of this name; or several, or none, and no name.
        """
        names = list(self.datasets.sources)
        if name is None and len(names) == 1:
            [name] = names
        if name is None:
            raise KeyError(
                f"get_dataset_shard() needs a name: the trainer's datasets are "
                f"{', '.join(map(repr, names)) or 'none'}."
            )
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def progress(self) -> dict[str, Any]:
        """Return how far this rank is in each dataset that it reads, as JSON values."""
        return {name: iterator.progress() for name, iterator in dict(self._made).items()}

    def _make(self, name: str) -> DataIterator:
        from miniray.train.data.iterator import DataIterator

        sources, config = self.datasets.sources, self.datasets.config
        if name not in sources:
            raise KeyError(
                f"get_dataset_shard({name!r}): the trainer has no such dataset, but "
                f"{', '.join(map(repr, sources)) or 'none at all'}. Give it one with "
                f"datasets={{{name!r}: ...}}."
            )
        split = config.splits(name)
        return DataIterator(
            name,
            _fetch(sources[name]),
            self.rank if split else 0,
            self.world_size if split else 1,
            config.seed if config.shuffles(name) else None,
            self.world_size,
        )


def _fetch(source: Any) -> Any:
    return get(source) if isinstance(source, ObjectRef) else source


_shards: Shards | None = None


def set_shards(shards: Shards | None) -> Shards | None:
    """Make these the datasets of the process, None outside a train loop; those before them."""
    global _shards
    earlier, _shards = _shards, shards
    return earlier


def get_dataset_shard(dataset_name: str | None = None) -> DataIterator:
    """Return this rank's part of a dataset that the trainer was given.

    Args:
        dataset_name: Its name in ``datasets``. May be left out if there is only one.

    Returns:
        The same iterator each time, with ``iter_torch_batches`` and ``iter_batches``.

    Raises:
        RuntimeError: Called outside a train loop.
        KeyError: The trainer was given no dataset of this name.
    """
    if _shards is None:
        raise RuntimeError(
            "miniray.train.get_dataset_shard() works only inside a train loop, in a process that "
            "a trainer started. Call it in the function given as train_loop_per_worker."
        )
    return _shards.get(dataset_name)
