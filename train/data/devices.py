"""The devices of this process, by the ids of those that it holds and the variables that it has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from miniray.api import is_initialized
from miniray.runtime_context import get_runtime_context

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

#: Devices of the driver's process while it runs a train loop itself.
_local: list[torch.device] | None = None


def set_local_devices(devices: list[torch.device] | None) -> list[torch.device] | None:
    """Make these the devices of the process, None for no rank; the devices before these."""
    global _local
    earlier, _local = _local, devices
    return earlier


def own_devices() -> list[torch.device]:
    """Return the GPUs that this process holds, or the CPU."""
    import torch

    if _local is not None:
        return _local
    if not is_initialized() or not torch.cuda.is_available():
        return [torch.device("cpu")]
    own = get_runtime_context().get_accelerator_ids().get("GPU", [])
    variable = visibility_variable(os.environ, rocm=torch.version.hip is not None)
    indexes = device_indexes(own, os.environ[variable] if variable is not None else None)
    return [torch.device("cuda", index) for index in indexes] or [torch.device("cpu")]


def visibility_variable(environ: Mapping[str, str], *, rocm: bool) -> str | None:
    """Return the variable that says which GPUs PyTorch sees; None if none is set.

    On ROCm, HIP counts within what ROCR leaves visible, so HIP's says which devices they are.
    """
    names = ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"] if rocm else []
    for name in [*names, "CUDA_VISIBLE_DEVICES"]:
        if name in environ:
            return name
    return None


def device_indexes(own: Sequence[str], visible: str | None) -> list[int]:
    """Return the numbers by which PyTorch knows a worker's devices.

    Raises:
        RuntimeError: A device of the worker is not visible.
    """
    if visible is None:
        return sorted(int(id) for id in own)
    ids = [id.strip() for id in visible.split(",")]
    missing = [id for id in own if id not in ids]
    if missing:
        raise RuntimeError(
            f"This worker holds the devices {', '.join(missing)}, but the process sees only "
            f"{visible!r}. Do not change CUDA_VISIBLE_DEVICES in a train loop."
        )
    return sorted(ids.index(id) for id in own)
