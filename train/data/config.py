"""``DataConfig``: which datasets are split over the workers, and which are shuffled."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from miniray.train.config.checks import is_whole

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from miniray.data.context import ExecutionOptions

#: The name in ``datasets`` that is usual for the data to train on.
TRAIN_DATASET_KEY = "train"


@dataclasses.dataclass
class DataConfig:
    """How ``datasets`` of a trainer reach its workers.

    Args:
        datasets_to_split: Names of those of which each worker gets its part, or ``"all"``. Of the
            others each worker gets every row.
        execution_options: A ``miniray.data.ExecutionOptions`` for what each worker has made of
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
