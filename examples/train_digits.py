"""Train a classifier of handwritten digits on two workers, on the CPU.

On the cluster that it finds, else on one of its own, it trains scikit-learn's 1,797 digits with
PyTorch's DistributedDataParallel, keeps the two best checkpoints, and measures
the best one on digits that training never saw:

    pip install 'miniray[train,examples]'
    python examples/train_digits.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import miniray
from miniray import train
from miniray.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def load_splits() -> dict[str, TensorDataset]:
    """The digits as three sets: 70% to train, 15% to choose a checkpoint, 15% to test it."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    rest, training = train_test_split(range(len(labels)), test_size=0.7, random_state=0)
    validation, test = train_test_split(rest, test_size=0.5, random_state=0)
    parts = {"train": training, "validation": validation, "test": test}
    return {name: TensorDataset(images[rows], labels[rows]) for name, rows in parts.items()}


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32 * 4 * 4, 10),
    )


def count_correct(model: nn.Module, loader: DataLoader) -> torch.Tensor:
    """How many digits of this loader the model gets right, and how many there are."""
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum() for images, labels in loader)
    return torch.tensor([int(right), len(loader.sampler)])


def train_loop(config: dict) -> None:
    """What every worker runs, each on its share of the digits."""
    torch.manual_seed(0)
    splits = load_splits()
    loaders = {
        name: prepare_data_loader(
            DataLoader(splits[name], batch_size=config["batch_size"], shuffle=name == "train")
        )
        for name in ("train", "validation")
    }
    model = prepare_model(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    loss_function = nn.CrossEntropyLoss()
    context = train.get_context()

    for epoch in range(config["epochs"]):
        model.train()
        if context.get_world_size() > 1:
            loaders["train"].sampler.set_epoch(epoch)
        for images, labels in loaders["train"]:
            loss = loss_function(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        counts = count_correct(model, loaders["validation"])
        dist.all_reduce(counts)
        metrics = {
            "epoch": epoch,
            "loss": loss.item(),
            "accuracy": (counts[0] / counts[1]).item(),
        }
        if context.get_world_rank() > 0:
            train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            inner = getattr(model, "module", model)  # without DistributedDataParallel around it
            torch.save(inner.state_dict(), Path(folder, "model.pt"))
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--storage-path", default=None, help="folder for the run's results")
    arguments = parser.parse_args()

    miniray.init()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": arguments.epochs, "batch_size": 32, "lr": 2e-3},
        scaling_config=train.ScalingConfig(num_workers=arguments.workers),
        run_config=train.RunConfig(
            storage_path=arguments.storage_path,
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="accuracy"
            ),
            callbacks=[train.ProgressCallback(total_epochs=arguments.epochs)],
        ),
    )
    result = trainer.fit()

    best = result.get_best_checkpoint("accuracy", "max")
    model = make_model()
    with best.as_directory() as folder:
        model.load_state_dict(torch.load(Path(folder, "model.pt"), weights_only=True))
    right, total = count_correct(model, DataLoader(load_splits()["test"], batch_size=256))
    print(f"test accuracy {right / total:.2f}")
    print(f"best checkpoint {best.path}")
    miniray.shutdown()


if __name__ == "__main__":
    main()
