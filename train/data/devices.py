"""The devices of a rank, and batches on their way to them: tensors inside of any yielded value.

Which these are follows from the ids that the process holds, and its variables. On a GPU, the next
batch can be copied on a stream of its own while one is used.
"""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from miniray.api import is_initialized
from miniray.runtime_context import get_runtime_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    """Return PyTorch's numbers of a worker's devices.

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


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device; values that can't be moved stay as they are.

    Lists, tuples, named tuples, mappings and dataclasses keep their types.
    """
    import torch

    if isinstance(batch, torch.Tensor | torch.nn.utils.rnn.PackedSequence):
        # Truly asynchronous only from pinned memory to a GPU.
        return batch.to(device, non_blocking=device.type == "cuda")
    if hasattr(batch, "to") and not isinstance(batch, type):
        return batch.to(device)
    return _rebuilt(batch, lambda item: move(item, device))


def _rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with changed items; anything else as it is."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(item) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(change(item) for item in batch)
    if isinstance(batch, collections.abc.MutableMapping):
        mapping = copy.copy(batch)  # keeps what a subclass has besides the items
        mapping.update({key: change(value) for key, value in batch.items()})
        return mapping
    if isinstance(batch, collections.abc.Mapping):
        return {key: change(value) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        instance = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # Frozen ones too: the copy is new, and not shared yet.
            object.__setattr__(instance, field.name, change(getattr(batch, field.name)))
        return instance
    return batch


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that ``move`` moves by itself."""
    import torch

    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, list | tuple):  # a PackedSequence is a tuple
        for item in batch:
            yield from tensors_in(item)
    elif isinstance(batch, collections.abc.Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors_in(getattr(batch, field.name))


def moved_ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on a GPU, each copied while the one before is used."""
    import torch

    copying = torch.cuda.Stream(device)
    waiting: list[Any] = []
    for batch in batches:
        with torch.cuda.stream(copying):
            moved = move(batch, device)
        if waiting:
            yield waiting.pop()
        using = torch.cuda.current_stream(device)
        using.wait_stream(copying)
        for tensor in tensors_in(moved):
            # Their memory was taken on the other stream; it must not be reused while in use here.
            # What stays on the CPU, as the lengths of a PackedSequence do, belongs to no stream.
            if tensor.device.type == "cuda":
                tensor.record_stream(using)
        waiting.append(moved)
    yield from waiting
