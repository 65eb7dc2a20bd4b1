"""What a PyTorch train loop uses: its device, and models and data loaders made for the group."""

from __future__ import annotations

import logging
import os
import random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from miniray.train.context import get_context
from miniray.train.torch.data_loader import DeviceDataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


def device_indexes(own: Sequence[str], visible: str | None) -> list[int]:
    """The numbers by which a framework knows a worker's devices.

    Args:
        own: Ids of the worker's devices.
        visible: The visibility variable of the process, or None if it is not set.

    Raises:
        RuntimeError: A device of the worker is not visible.
    """
    if visible is None:
        return [int(id) for id in own]
    ids = [id.strip() for id in visible.split(",")]
    missing = [id for id in own if id not in ids]
    if missing:
        raise RuntimeError(
            f"This worker holds the devices {', '.join(missing)}, but the process sees only "
            f"{visible!r}. Do not change CUDA_VISIBLE_DEVICES in a train loop."
        )
    return sorted(ids.index(id) for id in own)


def own_devices() -> list[torch.device]:
    """The GPUs that this worker holds, or the CPU."""
    import miniray

    own = miniray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not own or not torch.cuda.is_available():
        return [torch.device("cpu")]
    indexes = device_indexes(own, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [torch.device("cuda", index) for index in indexes]


def get_devices() -> list[torch.device]:
    """All devices of this worker: its GPUs, lowest number first, or the CPU.

    Raises:
        RuntimeError: Called outside a train loop.
    """
    get_context()
    return own_devices()


def get_device() -> torch.device:
    """The device of this worker: its first GPU, or the CPU.

    Raises:
        RuntimeError: Called outside a train loop.
    """
    return get_devices()[0]


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """Move a model to the worker's device and wrap it for the group.

    Args:
        model: The model.
        move_to_device: Whether to move it, or the device to move it to.
        parallel_strategy: ``"ddp"``, ``"fsdp"`` or None to leave the model as it is. With one
            worker it is never wrapped.
        parallel_strategy_kwargs: Arguments of DistributedDataParallel or FullyShardedDataParallel.

    Raises:
        ValueError: The strategy is not known.
        RuntimeError: FSDP without GPUs, or called outside a train loop.
    """
    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ValueError(
            f"prepare_model(parallel_strategy={parallel_strategy!r}) is not known. "
            f"Use 'ddp', 'fsdp' or None."
        )
    device = move_to_device if isinstance(move_to_device, torch.device) else get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if move_to_device:
        model = model.to(device)
    if parallel_strategy is None or get_context().get_world_size() == 1:
        return model
    options = dict(parallel_strategy_kwargs or {})
    if parallel_strategy == "ddp":
        if device.type != "cpu":
            options = {"device_ids": [device], "output_device": device, **options}
        return torch.nn.parallel.DistributedDataParallel(model, **options)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "prepare_model(parallel_strategy='fsdp') needs GPUs. "
            "Set ScalingConfig(use_gpu=True), or use 'ddp'."
        )
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, **options)


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> Any:
    """Give each worker its share of the data, on its device.

    With several workers the loader gets a DistributedSampler; call
    ``loader.sampler.set_epoch(epoch)`` before each epoch for a new order.

    Args:
        data_loader: The loader.
        add_dist_sampler: Whether to add the sampler; loaders of an IterableDataset and those that
            have one already stay as they are.
        move_to_device: Whether batches are moved to the worker's device.
        auto_transfer: On GPUs, whether the next batch is copied while the loop works.

    Raises:
        RuntimeError: Called outside a train loop.
    """
    context = get_context()
    if (
        add_dist_sampler
        and context.get_world_size() > 1
        and not isinstance(data_loader.sampler, DistributedSampler)
        and not isinstance(data_loader.dataset, IterableDataset)
    ):
        data_loader = _with_sampler(data_loader, warn=context.get_world_rank() == 0)
    if move_to_device:
        return DeviceDataLoader(data_loader, get_device(), auto_transfer)
    return data_loader


def _with_sampler(loader: DataLoader[Any], *, warn: bool) -> DataLoader[Any]:
    """The same loader with a DistributedSampler that shuffles if the loader did."""
    if warn and not isinstance(loader.sampler, SequentialSampler | RandomSampler):
        logger.warning(
            "prepare_data_loader() replaces the %s by a DistributedSampler. "
            "Pass add_dist_sampler=False to keep it.",
            type(loader.sampler).__name__,
        )
    shuffle = not isinstance(loader.sampler, SequentialSampler)
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=DistributedSampler(loader.dataset, shuffle=shuffle),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def enable_reproducibility(seed: int = 0) -> None:
    """Seed Python, NumPy and PyTorch, and let PyTorch use deterministic algorithms.

    Args:
        seed: The seed.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy as np
    except ImportError:
        logger.debug("NumPy is not installed, so it needs no seed.")
    else:
        np.random.seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
