"""The devices of this process: ``get_device`` and ``get_devices``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from miniray.train.torch.environment import device_indexes, visibility_variable
from miniray.train.worker.context import current_session

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Devices of the driver's process while it runs a train loop itself.
_local: list[torch.device] | None = None


def set_local_devices(devices: list[torch.device] | None) -> list[torch.device] | None:
    """Make these the devices of the process, None for no rank; the devices before these."""
    global _local
    earlier, _local = _local, devices
    return earlier


def own_devices() -> list[torch.device]:
    """The GPUs that this process holds, or the CPU."""
    import miniray

    if _local is not None:
        return _local
    if not miniray.is_initialized() or not torch.cuda.is_available():
        return [torch.device("cpu")]
    own = miniray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    variable = visibility_variable(os.environ, rocm=torch.version.hip is not None)
    return devices_of(own, os.environ[variable] if variable is not None else None)


def devices_of(own: Sequence[str], visible: str | None) -> list[torch.device]:
    """The devices of a worker that holds GPUs of these ids; without any, the CPU.

    Args:
        own: Ids of its GPUs.
        visible: The visibility variable of the process, or None if it is not set.
    """
    indexes = device_indexes(own, visible)
    return [torch.device("cuda", index) for index in indexes] or [torch.device("cpu")]


def get_devices() -> list[torch.device]:
    """All devices of this worker: its GPUs, lowest number first, or the CPU.

    Raises:
        RuntimeError: Called outside a train loop, or ``CUDA_VISIBLE_DEVICES`` was changed in it.
    """
    current_session("torch.get_devices")
    return own_devices()


def get_device() -> torch.device:
    """The device of this worker: its first GPU, or the CPU.

    Raises:
        RuntimeError: Called outside a train loop, or ``CUDA_VISIBLE_DEVICES`` was changed in it.
    """
    current_session("torch.get_device")
    return own_devices()[0]
