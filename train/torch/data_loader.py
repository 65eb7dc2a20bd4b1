"""``prepare_data_loader``: each worker's share of the data, on its device."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from miniray.train.data.tensors import move, moved_ahead
from miniray.train.torch.models import get_device
from miniray.train.torch.sampling import share_of
from miniray.train.worker.context import current_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> DataLoader[Any]:
    """Give each worker its share of the data, on its device.

    With several workers the loader gets a DistributedSampler that shuffles if the loader did; call
    ``loader.sampler.set_epoch(epoch)`` before each epoch for a new order. A batch sampler of one's
    own stays: each worker gets every n-th of its batches.

    Args:
        data_loader: The loader.
        add_dist_sampler: Whether to share the data; loaders of an IterableDataset and those that
            are shared already stay as they are.
        move_to_device: Whether batches are moved to the worker's device.
        auto_transfer: On GPUs, whether the next batch is copied, through pinned memory, while the
            loop works on one.

    Returns:
        A loader with the same attributes and length.

    Raises:
        TypeError: This is no DataLoader.
        RuntimeError: Called outside a train loop.
    """
    if not isinstance(data_loader, DataLoader):
        raise TypeError(
            f"prepare_data_loader() takes a torch.utils.data.DataLoader, not {data_loader!r}."
        )
    ranks = current_session("torch.prepare_data_loader").ranks
    if add_dist_sampler and ranks.world_size > 1:
        data_loader = share_of(data_loader, ranks.world_rank, ranks.world_size)
    if not move_to_device:
        return data_loader
    device = get_device()
    ahead = auto_transfer and device.type == "cuda"
    if ahead and not data_loader.pin_memory:
        # Without pinned memory a copy to the device waits until it is done.
        data_loader = copy.copy(data_loader)
        data_loader.pin_memory = True
    return DeviceDataLoader(data_loader, device, ahead=ahead)


class DeviceDataLoader(DataLoader[Any]):  # type: ignore[misc] # PyTorch is Any to mypy here
    """A loader that moves each batch to a device; otherwise the loader it wraps.

    Args:
        loader: The loader.
        device: Where batches go.
        ahead: Copy the next batch to the GPU on a stream of its own while this one is used.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, *, ahead: bool) -> None:
        # Not that of the base class: every attribute is the wrapped loader's.
        self.__dict__.update(loader.__dict__)
        if hasattr(loader.batch_sampler, "set_epoch"):
            # So that `loader.sampler.set_epoch(epoch)` is right for every prepared loader.
            self.__dict__["sampler"] = loader.batch_sampler
        self._loader = loader
        self._device = device
        self._ahead = ahead

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._ahead:
            return moved_ahead(self._loader, self._device)
        return (move(batch, self._device) for batch in self._loader)
