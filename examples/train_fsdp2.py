"""Shard a model over the workers, save it in shards, and go on with another number of workers.

With FSDP2 each worker holds a part of every weight and of the optimizer's state. Each writes its
part into the checkpoint, and reads what it needs of it when the run goes on: here with two
workers at first, then with three:

    pip install 'miniray[train,examples]'
    python examples/train_fsdp2.py
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, TensorDataset

import miniray
from miniray import train
from miniray.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def load_splits() -> tuple[TensorDataset, TensorDataset]:
    """Digits to train with, and others to measure the loss with."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    return TensorDataset(images[300:], labels[300:]), TensorDataset(images[:300], labels[:300])


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write this worker's shards."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "epoch": epoch}, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read this worker's shards, whoever wrote them; returns the epoch."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "epoch": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return state["epoch"]


def train_loop(config: dict) -> dict:
    """What every worker runs; returns what rank 0 has seen of it."""
    torch.manual_seed(0)
    training, validation = load_splits()
    loader = prepare_data_loader(
        DataLoader(training, batch_size=config["batch_size"], shuffle=True)
    )
    images, labels = validation.tensors
    device = train.torch.get_device()
    images, labels = images.to(device), labels.to(device)

    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    model = prepare_model(
        model,
        parallel_strategy="fsdp2",
        # Each of these layers is gathered when it is used, and sharded again after that.
        parallel_strategy_kwargs={"layer_classes": (nn.Linear,)},
    )
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loss_function = nn.CrossEntropyLoss()

    def validation_loss() -> float:
        with torch.no_grad():  # all workers take part, each with the same digits
            return loss_function(model(images), labels).item()

    seen = {"share": held / total, "first_epoch": 0}
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            seen["first_epoch"] = load(folder, model, optimizer) + 1
        seen["loss_when_loaded"] = validation_loss()

    for epoch in range(seen["first_epoch"], config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = loss_function(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            save(folder, model, optimizer, epoch)
            # What all workers report becomes one checkpoint.
            train.report(
                {"epoch": epoch, "loss": validation_loss()},
                checkpoint=train.Checkpoint.from_directory(folder),
            )
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workers", type=int, nargs=2, default=[2, 3], help="first and then; 2 or more each"
    )
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=3, help="with each number of workers")
    parser.add_argument("--storage-path", default=None, help="folder for the run's results")
    arguments = parser.parse_args()

    miniray.init("local", num_cpus=max(arguments.workers))
    name = f"fsdp2-{uuid.uuid4().hex[:8]}"
    told = []
    for number, workers in enumerate(arguments.workers, start=1):
        result = TorchTrainer(
            train_loop,
            train_loop_config={"epochs": number * arguments.epochs, "batch_size": 32, "lr": 1e-3},
            scaling_config=train.ScalingConfig(num_workers=workers, use_gpu=arguments.use_gpu),
            # The same name again: the run goes on.
            run_config=train.RunConfig(name=name, storage_path=arguments.storage_path),
        ).fit()
        seen = result.return_value
        told.append(f"{workers} workers, rank 0 holds {seen['share']:.0%} of the weights")
        if "loss_when_loaded" in seen:
            told.append(f"  loss when loaded {seen['loss_when_loaded']:.4f}")
        told.append(
            f"  epochs {seen['first_epoch']} to {result.metrics['epoch']}, "
            f"loss {result.metrics['loss']:.4f}"
        )
        with result.checkpoint.as_directory() as folder:
            files = sorted(path.name for path in Path(folder).iterdir())
            told.append(f"  saved {' '.join(files)}")
    print("\n".join(told))
    miniray.shutdown()


if __name__ == "__main__":
    main()
