"""Train a vision transformer on two workers, and go on with it later.

The train loop is that of a single machine with three changes, numbered below. Model and data
are small enough for a CPU: scikit-learn's digits, 8 x 8 pixels each. The run is started
twice under one name: with half of the epochs, and then with all of them, when it goes on from
its newest checkpoint:

    pip install 'miniray[train,examples]'
    python examples/train_vit.py
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import miniray
from miniray import train
from miniray.train.torch import TorchTrainer, prepare_data_loader, prepare_model


class VisionTransformer(nn.Module):
    """Patches of an image become tokens; a class token in front of them learns what it shows."""

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        mlp_dim: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        tokens = (image_size // patch_size) ** 2 + 1
        self.patches = nn.Conv2d(1, hidden_dim, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden_dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, hidden_dim))
        layer = nn.TransformerEncoderLayer(
            hidden_dim, num_heads, mlp_dim, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(hidden_dim)
        self.head = nn.Linear(hidden_dim, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(images), -1, -1)
        tokens = self.encoder(torch.cat([first, tokens], dim=1) + self.positions)
        return self.head(self.norm(tokens[:, 0]))


def get_dataloaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Four fifths of the digits to train with, one fifth to validate with."""
    digits = load_digits()
    images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32).unsqueeze(1)
    data = TensorDataset(images, torch.tensor(digits.target))
    training, validation = torch.utils.data.random_split(
        data, [0.8, 0.2], torch.Generator().manual_seed(0)
    )
    return (
        DataLoader(training, batch_size=batch_size, shuffle=True),
        DataLoader(validation, batch_size=batch_size),
    )


def train_func_per_worker(config: dict) -> int:
    """What every worker runs; returns the epoch at which it began."""
    torch.manual_seed(0)
    train_dataloader, valid_dataloader = get_dataloaders(config["batch_size_per_worker"])

    # [1] Each worker gets rows of its own, on its device.
    train_dataloader = prepare_data_loader(train_dataloader)
    valid_dataloader = prepare_data_loader(valid_dataloader)

    network = VisionTransformer(
        image_size=8,
        patch_size=2,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=128,
        num_classes=10,
    )
    # [2] The network is moved to the worker's device, and its gradients are averaged over all
    # workers.
    model = prepare_model(network)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=1e-2)

    # [3] Each epoch reports its metrics with a checkpoint. If there is one already, from an
    # earlier run of this name or from before a failure, training goes on from there.
    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1

    for epoch in range(start, config["epochs"]):
        if train.get_context().get_world_size() > 1:
            train_dataloader.sampler.set_epoch(epoch)  # another order in each epoch

        model.train()
        for images, labels in train_dataloader:
            loss = loss_fn(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        sums = torch.zeros(3, device=train.torch.get_device())  # loss, right, rows
        with torch.no_grad():
            for images, labels in valid_dataloader:
                scores = model(images)
                right = (scores.argmax(1) == labels).sum()
                rows = torch.tensor(len(labels), device=right.device)
                sums += torch.stack([loss_fn(scores, labels) * rows, right, rows])
        dist.all_reduce(sums)
        loss, right, rows = sums.tolist()
        metrics = {"epoch": epoch, "loss": loss / rows, "accuracy": right / rows}

        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                state = {
                    "model": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, Path(folder, "state.pt"))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report(metrics, checkpoint=checkpoint)
    return start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--storage-path", default=None, help="folder for the run's results")
    arguments = parser.parse_args()

    global_batch_size = 64
    name = f"vit-{uuid.uuid4().hex[:8]}"

    def fit(epochs: int) -> train.Result:
        trainer = TorchTrainer(
            train_func_per_worker,
            train_loop_config={
                "lr": 3e-3,
                "epochs": epochs,
                "batch_size_per_worker": global_batch_size // arguments.workers,
            },
            scaling_config=train.ScalingConfig(
                num_workers=arguments.workers, use_gpu=arguments.use_gpu
            ),
            run_config=train.RunConfig(
                name=name,
                storage_path=arguments.storage_path,
                checkpoint_config=train.CheckpointConfig(num_to_keep=2),
            ),
        )
        return trainer.fit()

    miniray.init("local", num_cpus=arguments.workers)
    results = [fit(arguments.epochs // 2), fit(arguments.epochs)]
    for result in results:
        print(
            f"trained epochs {result.return_value} to {result.metrics['epoch']}, "
            f"accuracy {result.metrics['accuracy']:.2f}"
        )
    print(results[-1])
    miniray.shutdown()


if __name__ == "__main__":
    main()
