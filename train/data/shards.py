"""``DataConfig``, and the datasets of a trainer on their way to its ranks and their iterators."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import TYPE_CHECKING, Any, Literal

from miniray.api import get
from miniray.common.object_ref import ObjectRef
from miniray.train.config.checks import is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from miniray.data.context import ExecutionOptions
    from miniray.train.data.datasets import PoolSpec
    from miniray.train.data.iterator import DataIterator


#: The name in ``datasets`` that is usual for the data to train on.
TRAIN_DATASET_KEY = "train"


@dataclasses.dataclass
class DataConfig:
    """How ``datasets`` of a trainer reach its workers.

    Args:
        datasets_to_split: Names of datasets that are split over the workers, or ``"all"``. Of the
            others each worker gets every row.
        execution_options: A ``miniray.data.ExecutionOptions`` for each worker's execution of
            datasets of ``miniray.data``, or a dictionary of them by name. Rows are in order in any
            case.
        enable_shard_locality: Accepted as in Ray: each worker reads its part by itself.
        datasets_to_shuffle: Names of those whose rows come in a new order in each epoch, or
            ``"all"``. The others keep their order, and so would a dataset sorted by label: each
            worker would see only some of the labels. Iterable datasets come in their own order.
        seed: From which the orders are drawn. The same seed gives the same orders.

    Raises:
        ValueError: A value makes no sense; the message says which and what is allowed.
        TypeError: A subclass has a ``configure`` as Ray's, which would never be called.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "configure" in vars(cls):
            raise TypeError(
                f"{cls.__qualname__}.configure is how Ray's trainers prepare datasets, and is not "
                f"called here. Prepare them before they are given to the trainer, or in the train "
                f"loop."
            )

    datasets_to_split: Literal["all"] | Sequence[str] = "all"
    execution_options: ExecutionOptions | Mapping[str, ExecutionOptions] | None = None
    enable_shard_locality: bool = True
    _: dataclasses.KW_ONLY
    datasets_to_shuffle: Literal["all"] | Sequence[str] = "all"
    seed: int = 0

    def __post_init__(self) -> None:
        self.datasets_to_split = _names("datasets_to_split", self.datasets_to_split)
        self.datasets_to_shuffle = _names("datasets_to_shuffle", self.datasets_to_shuffle)
        if not is_whole(self.seed, least=0):
            raise ValueError(f"DataConfig(seed={self.seed!r}) must be a whole number, 0 or more.")
        given: Any = self.execution_options
        for each in given.values() if isinstance(given, dict) else [given]:
            if each is not None and not hasattr(each, "resource_limits"):
                raise ValueError(
                    f"DataConfig(execution_options={given!r}) must be a "
                    f"miniray.data.ExecutionOptions, or a dictionary of them by names of datasets."
                )

    @staticmethod
    def default_ingest_options() -> ExecutionOptions:
        """Return the options of the ``DataContext``, to be changed and given to a trainer."""
        from miniray.data import DataContext

        return copy.deepcopy(DataContext.get_current().execution_options)

    def check_names(self, known: Collection[str]) -> None:
        """Raise ValueError if a dataset is named that the trainer was not given."""
        for argument in ("datasets_to_split", "datasets_to_shuffle"):
            chosen = getattr(self, argument)
            unknown = [] if chosen == "all" else [name for name in chosen if name not in known]
            if unknown:
                raise ValueError(
                    f"DataConfig({argument}) names {unknown[0]!r}, but the trainer's datasets are: "
                    f"{', '.join(sorted(known)) or 'none'}."
                )

    def options(self, name: str) -> ExecutionOptions | None:
        """Return how a dataset is executed, if that is said."""
        given: Any = self.execution_options
        return given.get(name) if isinstance(given, dict) else given

    def splits(self, name: str) -> bool:
        """Return whether each worker gets a part of this dataset only."""
        return self.datasets_to_split == "all" or name in self.datasets_to_split

    def shuffles(self, name: str) -> bool:
        """Return whether each epoch of this dataset has an order of its own."""
        return self.datasets_to_shuffle == "all" or name in self.datasets_to_shuffle


def _names(argument: str, value: Any) -> Any:
    if value == "all":
        return value
    strings = isinstance(value, list | tuple | set | frozenset) and all(
        isinstance(name, str) for name in value
    )
    if not strings:
        raise ValueError(
            f'DataConfig({argument}={value!r}) must be "all" or a list of names of datasets.'
        )
    return list(value)


@dataclasses.dataclass(frozen=True)
class Datasets:
    """The datasets of a run, as they travel with its train loop."""

    sources: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: DataConfig = dataclasses.field(default_factory=DataConfig)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that reading the sources needs, the same ones for each rank."""
        return tuple(sorted({m for source in self.sources.values() for m in source.modules}))

    def pools(self, put: Callable[[Any], Any]) -> list[PoolSpec]:
        """Return the pools of all datasets, with refs of their code."""
        return [
            pool._replace(dataset=name, work=put(pool.work))
            for name, source in self.sources.items()
            for pool in source.pools
        ]

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
    """The iterators of one rank, each made at its first use.

    Attributes:
        pools: The actors of datasets' pools that all ranks use, if these do not have their own.
    """

    datasets: Datasets
    rank: int
    world_size: int
    pools: Mapping[str, Sequence[Sequence[Any]]] = dataclasses.field(default_factory=dict)
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
        split, source = config.splits(name), sources[name]
        source = get(source) if isinstance(source, ObjectRef) else source
        if name in self.pools:
            source = source.through(self.pools[name], self.rank)
        return DataIterator(
            name,
            source,
            self.rank if split else 0,
            self.world_size if split else 1,
            config.seed if config.shuffles(name) else None,
            self.world_size,
        )


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
