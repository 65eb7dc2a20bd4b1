"""``prepare_data_loader``: each worker's share of the data, on its device.

Every rank computes the same shares by itself.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from miniray.train.data.devices import move, moved_ahead
from miniray.train.torch.models import get_device
from miniray.train.worker.context import current_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

logger = logging.getLogger(__name__)


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> DataLoader[Any]:
    """Give each worker its share of the data, on its device.

    With several workers the loader gets a DistributedSampler that shuffles if the loader did; call
    ``loader.sampler.set_epoch(epoch)`` before each epoch for a new order.

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
        TypeError: This is not a DataLoader.
        ValueError: It has a batch sampler of its own, which can't be shared.
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

    With ``ahead``, the next batch is copied to the GPU on a stream of its own while one is used.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, *, ahead: bool) -> None:
        # Not that of the base class: every attribute is the wrapped loader's.
        self.__dict__.update(loader.__dict__)
        self._loader = loader
        self._device = device
        self._ahead = ahead

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._ahead:
            return moved_ahead(self._loader, self._device)
        return (move(batch, self._device) for batch in self._loader)


def share_of(loader: DataLoader[Any], rank: int, world_size: int) -> DataLoader[Any]:
    """Return the loader for one rank of several.

    Loaders of an iterable dataset and those that are distributed already stay as they are.
    """
    if isinstance(loader.dataset, IterableDataset) or _is_distributed(loader):
        return loader
    given: Any = loader.batch_sampler
    if loader.batch_size is not None or given is None:
        sampler = _sampler(loader, loader.sampler, rank, world_size)
        return rebuilt(
            loader, batch_size=loader.batch_size, drop_last=loader.drop_last, sampler=sampler
        )
    if type(given) is BatchSampler and isinstance(given.sampler, SequentialSampler | RandomSampler):
        # Batches of fixed size: shares of samples are as good, and every rank gets full batches.
        sampler = _sampler(loader, given.sampler, rank, world_size)
        return rebuilt(
            loader, batch_size=given.batch_size, drop_last=given.drop_last, sampler=sampler
        )
    own = given.sampler if type(given) is BatchSampler else given
    raise ValueError(
        f"prepare_data_loader() can't share out the batches of a {type(own).__name__}. Have it "
        f"give each rank its own, by get_context().get_world_rank() and get_world_size(), and pass "
        f"add_dist_sampler=False."
    )


def _is_distributed(loader: DataLoader[Any]) -> bool:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(each, DistributedSampler) for each in samplers)


def _sampler(
    loader: DataLoader[Any], given: Any, rank: int, world_size: int
) -> DistributedSampler[Any]:
    """Return a sampler of one share of the dataset that shuffles if the loader did."""
    if rank == 0 and not isinstance(given, SequentialSampler | RandomSampler):
        logger.warning(
            "prepare_data_loader() replaces the %s by a DistributedSampler. "
            "Pass add_dist_sampler=False to keep it.",
            type(given).__name__,
        )
    shuffle = not isinstance(given, SequentialSampler)
    return DistributedSampler(loader.dataset, world_size, rank, shuffle=shuffle)


def rebuilt(loader: DataLoader[Any], **batches: Any) -> DataLoader[Any]:
    """Return the same loader with other arguments for batches."""
    return DataLoader(
        loader.dataset,
        **batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
