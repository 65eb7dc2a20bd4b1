"""Training with Hugging Face Transformers in the train loop of a ``TorchTrainer``.

The names are those of Ray Train's module. Transformers is loaded when this module is;
the train loop imports it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from miniray.train.data.iterator import BatchIterable
from miniray.train.storage.checkpoint import Checkpoint
from miniray.train.worker.context import get_context, report

try:
    from transformers.trainer_callback import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "miniray.train.huggingface.transformers needs Hugging Face Transformers, which is not "
        "installed. Run `pip install transformers`."
    ) from None

if TYPE_CHECKING:
    from collections.abc import Iterator


class RayTrainReportCallback(TrainerCallback):  # type: ignore[misc]
    """Reports when the trainer saves: its newest logs, epoch, step, and the checkpoint.

    The checkpoint holds the folder ``CHECKPOINT_NAME``, from which
    ``trainer.train(resume_from_checkpoint=...)`` goes on. Rank 0's files are in it, and of the
    other ranks those that differ by rank, such as the state of random numbers.
    """

    #: Name of the trainer's checkpoint in ours.
    CHECKPOINT_NAME = "checkpoint"

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        metrics: dict[str, Any] = {}
        for log in state.log_history:
            metrics.update(log)
        metrics |= {"epoch": state.epoch, "step": state.global_step}
        source = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        with tempfile.TemporaryDirectory(prefix="miniray_transformers_") as folder:
            written = self._copy(source, Path(folder))
            report(metrics, checkpoint=Checkpoint.from_directory(folder) if written else None)

    def _copy(self, source: Path, folder: Path) -> bool:
        """Copy what this rank adds to the checkpoint; False if there are no such files."""
        rank = get_context().get_world_rank()
        pattern = "*" if rank == 0 else f"*_{rank}.pth"
        target = folder / self.CHECKPOINT_NAME
        for path in source.glob(pattern):
            target.mkdir(exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target / path.name)
            else:
                shutil.copyfile(path, target / path.name)
        return target.exists()


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
            loader = _loader(self.train_dataset)
            return loader if loader is not None else super().get_train_dataloader()

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            given = self.eval_dataset if eval_dataset is None else eval_dataset
            if isinstance(given, str):  # one of several, which the trainer goes through by name
                given = self.eval_dataset[given]
            loader = _loader(given)
            return loader if loader is not None else super().get_eval_dataloader(eval_dataset)

    trainer.__class__ = PreparedTrainer
    return trainer


def _loader(dataset: Any) -> Any:
    """Return a loader that passes batches on, or None for other datasets."""
    if not isinstance(dataset, BatchIterable):
        return None
    return DataLoader(_Batches(dataset), batch_size=None)


MinirayTrainReportCallback = RayTrainReportCallback

__all__ = ["MinirayTrainReportCallback", "RayTrainReportCallback", "prepare_trainer"]
