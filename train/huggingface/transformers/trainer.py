"""Lets a Transformers trainer read batches of ``get_dataset_shard()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from miniray.train.data.iterator import BatchIterable

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Batches(IterableDataset[Any]):  # type: ignore[misc]
    """Batches as a dataset whose items are batches."""

    def __init__(self, batches: BatchIterable) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def prepare_trainer(trainer: Any) -> Any:
    """Let a ``transformers.Trainer`` take what ``iter_torch_batches()`` returns as its datasets.

    Such batches are split over the workers already, and have their size. A trainer of them needs
    ``TrainingArguments(max_steps=...)`` only if the data are an iterable dataset. Other datasets
    stay as they are: the trainer splits them itself.

    Args:
        trainer: The trainer.

    Returns:
        The trainer, of a class derived from its own.
    """
    base = type(trainer)

    class PreparedTrainer(base):  # type: ignore[valid-type, misc]
        """The user's trainer, with loaders for batches that were made elsewhere."""

        def get_train_dataloader(self) -> Any:
            """The loader of the training data."""
            loader = _loader(self.train_dataset)
            return loader if loader is not None else super().get_train_dataloader()

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            """The loader of the evaluation data."""
            given = self.eval_dataset if eval_dataset is None else eval_dataset
            if isinstance(given, str):  # one of several, which the trainer goes through by name
                given = self.eval_dataset[given]
            loader = _loader(given)
            return loader if loader is not None else super().get_eval_dataloader(eval_dataset)

    trainer.__class__ = PreparedTrainer
    return trainer


def _loader(dataset: Any) -> Any:
    """A loader that passes batches on, or None for other datasets."""
    if not isinstance(dataset, BatchIterable):
        return None
    return DataLoader(_Batches(dataset), batch_size=None)
