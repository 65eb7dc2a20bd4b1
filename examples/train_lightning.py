"""Train with PyTorch Lightning on two workers, on the CPU.

A LightningModule as it is anywhere else: strategy and environment tell Lightning of the
workers, and a callback reports metrics and a checkpoint after each epoch:

    pip install 'miniray[train,lightning,examples]'
    python examples/train_lightning.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import miniray
from miniray import train
from miniray.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from miniray.train.torch import TorchTrainer


class DigitClassifier(pl.LightningModule):
    """Two layers; nothing in it knows of workers."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)

    def training_step(self, batch: tuple, batch_index: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple, batch_index: int) -> None:
        images, labels = batch
        right = (self(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def load_splits() -> dict[str, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = {"train": order[:1200], "validation": order[1200:1500], "test": order[1500:]}
    return {name: TensorDataset(images[rows], labels[rows]) for name, rows in parts.items()}


def train_loop(config: dict) -> None:
    """What every worker runs; Lightning gives each its share of the rows."""
    pl.seed_everything(0, verbose=False)
    splits = load_splits()
    trainer = prepare_trainer(
        pl.Trainer(
            max_epochs=config["epochs"],
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback()],
            # Checkpoints, metrics and progress are the run's.
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
    )
    checkpoint = train.get_checkpoint()  # after a failure, or of an earlier run of this name
    resume = None
    if checkpoint is not None:
        resume = Path(checkpoint.to_directory(), RayTrainReportCallback.CHECKPOINT_NAME)
    trainer.fit(
        DigitClassifier(),
        DataLoader(splits["train"], batch_size=32, shuffle=True),
        DataLoader(splits["validation"], batch_size=150),
        ckpt_path=resume,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--storage-path", default=None, help="folder for the run's results")
    arguments = parser.parse_args()

    miniray.init("local", num_cpus=arguments.workers)
    result = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": arguments.epochs},
        scaling_config=train.ScalingConfig(
            num_workers=arguments.workers, use_gpu=arguments.use_gpu
        ),
        run_config=train.RunConfig(
            storage_path=arguments.storage_path,
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="accuracy"
            ),
        ),
    ).fit()

    best = result.get_best_checkpoint("accuracy", "max")
    with best.as_directory() as folder:
        path = Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)
        model = DigitClassifier.load_from_checkpoint(path, map_location="cpu")
    images, labels = load_splits()["test"].tensors
    right = (model(images).argmax(1) == labels).float().mean()
    print(f"test accuracy {right:.2f}")
    print(f"best checkpoint {best.path}")
    miniray.shutdown()


if __name__ == "__main__":
    main()
