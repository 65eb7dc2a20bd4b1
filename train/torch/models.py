"""``prepare_model`` and ``enable_reproducibility`` for PyTorch's models in train loops."""

from __future__ import annotations

import logging
import os
import random
import time
from typing import TYPE_CHECKING, Any

import torch

from miniray.common.series import COUNTED, SECONDS, took
from miniray.train.data.devices import own_devices
from miniray.train.worker.context import current_session

if TYPE_CHECKING:
    from collections.abc import Collection

logger = logging.getLogger(__name__)


def enable_reproducibility(seed: int = 0) -> None:
    """Seed Python, NumPy and PyTorch, and let PyTorch use deterministic algorithms.

    Processes of data loaders get their seeds from PyTorch's, so they are covered. Call it before
    anything is computed on a GPU.

    Args:
        seed: The seed.

    Raises:
        ValueError: The seed is not a whole number from 0 to 2**32 - 1, as NumPy wants it.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(
            f"enable_reproducibility(seed={seed!r}) must be a whole number from 0 to 2**32 - 1."
        )
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


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Count an optimizer's steps in the cluster's metrics; return it.

    Raises:
        RuntimeError: Called outside a train loop.
    """
    session = current_session("torch.prepare_optimizer")
    run = ("run", session.storage.name)
    rank = ("rank", str(session.ranks.world_rank))
    steps = COUNTED.values(("counter", "train_steps_total", "", ()), (run, rank))
    times = COUNTED.values(("histogram", "train_step_seconds", "", SECONDS), (run,))
    last = 0.0

    def stepped(*_step: Any) -> None:
        nonlocal last
        now = time.perf_counter()
        steps[0] += 1
        if last:
            took(times, now - last)
        last = now

    if not getattr(optimizer, "_steps_are_counted", False):
        optimizer._steps_are_counted = True
        optimizer.register_step_post_hook(stepped)
    return optimizer


STRATEGIES = ("ddp", "fsdp", "fsdp2")


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """Move a model to the worker's device and wrap it for the group.

    Args:
        model: The model.
        move_to_device: Whether to move it, or the device to move it to. ``"fsdp2"`` puts what it
            shards on the device in any case.
        parallel_strategy: ``"ddp"`` for DistributedDataParallel, ``"fsdp"`` for
            FullyShardedDataParallel (needs GPUs), ``"fsdp2"`` for ``fully_shard``, which shards
            the model in place, or None to leave the model as it is. With one worker it is never
            wrapped.
        parallel_strategy_kwargs: Arguments of the wrapper. ``"fsdp2"`` also takes
            ``layer_classes``, classes of submodules that are sharded each for itself, so that
            their parameters are gathered one after another.

    Returns:
        The wrapped model; for ``"fsdp2"``, one worker or None the model itself.

    Raises:
        TypeError: This is not a module.
        ValueError: The strategy is not known, or there are arguments without a strategy.
        RuntimeError: ``"fsdp"`` without GPUs, or called outside a train loop.
        ImportError: ``"fsdp2"`` with a PyTorch that does not have it.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"prepare_model() takes a torch.nn.Module, not {model!r}.")
    if parallel_strategy is not None and parallel_strategy not in STRATEGIES:
        raise ValueError(
            f"prepare_model(parallel_strategy={parallel_strategy!r}) is not known. "
            f"Use one of {', '.join(STRATEGIES)}, or None."
        )
    if parallel_strategy is None and parallel_strategy_kwargs:
        raise ValueError(
            f"prepare_model(parallel_strategy=None) wraps nothing, so it takes no "
            f"parallel_strategy_kwargs such as {next(iter(parallel_strategy_kwargs))!r}."
        )
    ranks = current_session("torch.prepare_model").ranks
    device = move_to_device if isinstance(move_to_device, torch.device) else get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone = ranks.world_size == 1
    if move_to_device and (alone or parallel_strategy != "fsdp2"):
        model = model.to(device)
    if parallel_strategy is None or alone:
        return model
    options = dict(parallel_strategy_kwargs or {})
    if ranks.local_rank == 0:
        logger.info("Wrapping the model for %s on %s.", parallel_strategy, device)
    if parallel_strategy == "ddp":
        return _ddp(model, device, options)
    if parallel_strategy == "fsdp":
        return _fsdp(model, options)
    return _fsdp2(model, device, ranks.world_size, options)


def _ddp(model: torch.nn.Module, device: torch.device, options: dict[str, Any]) -> torch.nn.Module:
    if device.type != "cpu":
        options = {"device_ids": [device], "output_device": device, **options}
    return torch.nn.parallel.DistributedDataParallel(model, **options)


def _fsdp(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "prepare_model(parallel_strategy='fsdp') needs GPUs. "
            "Set ScalingConfig(use_gpu=True), or use 'fsdp2' or 'ddp', which need none."
        )
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, **options)


def _fsdp2(
    model: torch.nn.Module, device: torch.device, world_size: int, options: dict[str, Any]
) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise ImportError(
            f"prepare_model(parallel_strategy='fsdp2') needs PyTorch 2.6 or newer, "
            f"and this is {torch.__version__}."
        ) from error
    layer_classes = tuple(options.pop("layer_classes", ()))
    # The default mesh is of any accelerator of the machine, also when this worker holds none.
    if "mesh" not in options:
        options["mesh"] = init_device_mesh(device.type, (world_size,))
    for layer in layers_of(model, layer_classes):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def layers_of(model: torch.nn.Module, classes: Collection[type]) -> list[torch.nn.Module]:
    """Return the submodules of these classes, inner ones before those that contain them.

    Raises:
        ValueError: The model has none of a class, which is probably a mistake.
    """
    for wanted in classes:
        if not any(isinstance(module, wanted) for module in model.modules()):
            raise ValueError(
                f"prepare_model(parallel_strategy_kwargs) names the layer class "
                f"{wanted.__qualname__}, but {type(model).__qualname__} has no such submodule."
            )
    found = [
        module
        for module in model.modules()
        if module is not model and isinstance(module, tuple(classes))
    ]
    return found[::-1]


def get_devices() -> list[torch.device]:
    """Return all devices of this worker: its GPUs, lowest number first, or the CPU.

    Raises:
        RuntimeError: Called outside a train loop, or ``CUDA_VISIBLE_DEVICES`` was changed in it.
    """
    current_session("torch.get_devices")
    return own_devices()


def get_device() -> torch.device:
    """Return the device of this worker: its first GPU, or the CPU.

    Raises:
        RuntimeError: Called outside a train loop, or ``CUDA_VISIBLE_DEVICES`` was changed in it.
    """
    current_session("torch.get_device")
    return own_devices()[0]
