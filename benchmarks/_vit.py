"""A small vision transformer in training on synthetic images: the work of the rows about steps.

The same on every engine and under torchrun. It has the form of torchvision's ``VisionTransformer``
for CIFAR-10, half as wide and half as deep, so that a step takes a CPU a fraction of a second.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _sizes import Sizes

IMAGE, PATCH, CLASSES = 32, 4, 10
#: Batches per epoch and rank.
BATCHES = 32


class VisionTransformer(nn.Module):
    """Patches of an image, a class token, a transformer, and a linear layer on that token."""

    def __init__(self, size: Sizes) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.hidden, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, size.hidden))
        places = (IMAGE // PATCH) ** 2 + 1
        self.places = nn.Parameter(torch.randn(1, places, size.hidden) * 0.02)
        layer = nn.TransformerEncoderLayer(
            size.hidden,
            size.heads,
            size.mlp,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the classes, for each image."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token.expand(len(images), -1, -1)
        hidden = self.layers(torch.cat([token, patches], 1) + self.places)
        scores: torch.Tensor = self.head(self.norm(hidden[:, 0]))
        return scores


def data(size: Sizes, world_size: int) -> TensorDataset:
    """Images of noise with labels."""
    count = size.batch * BATCHES * world_size
    torch.manual_seed(0)
    return TensorDataset(torch.randn(count, 3, IMAGE, IMAGE), torch.randint(CLASSES, (count,)))


class Training:
    """The model in training, on this rank.

    Args:
        model: The model, on all ranks one.
        batches: This rank's batches.
    """

    def __init__(self, model: nn.Module, batches: DataLoader[Any]) -> None:
        self.model = model
        self._batches = self._endless(batches)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
        self._loss = nn.CrossEntropyLoss()

    def step(self) -> float:
        """Train with one batch, on all ranks together; the loss."""
        images, labels = next(self._batches)
        loss = self._loss(self.model(images), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.item())

    @staticmethod
    def _endless(batches: DataLoader[Any]) -> Iterator[Any]:
        epoch = 0
        while True:
            batches.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from batches
            epoch += 1


def with_engine(package: str, size: Sizes) -> Training:
    """The training in a train loop of an engine, prepared as its documentation says."""
    import importlib

    train = importlib.import_module(f"{package}.train.torch")
    context = importlib.import_module(f"{package}.train").get_context()
    batches = DataLoader(data(size, context.get_world_size()), size.batch, shuffle=True)
    return Training(
        train.prepare_model(VisionTransformer(size)), train.prepare_data_loader(batches)
    )


@contextlib.contextmanager
def with_torchrun(size: Sizes) -> Iterator[tuple[Training, int]]:
    """The training in a process that torchrun has started, and its rank."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    try:
        images = data(size, int(os.environ["WORLD_SIZE"]))
        batches = DataLoader(images, size.batch, sampler=DistributedSampler(images))
        yield Training(DistributedDataParallel(VisionTransformer(size)), batches), dist.get_rank()
    finally:
        dist.destroy_process_group()


def run_steps(
    training: Training, count: int, every: int, report: Callable[[dict[str, float]], Any] | None
) -> None:
    """Train for some steps, and report the loss after each ``every``."""
    for number in range(1, count + 1):
        loss = training.step()
        if report is not None and number % every == 0:
            report({"loss": loss})
