"""Moves batches to a device: tensors inside of whatever a data loader yields.

On a GPU, the next batch can be copied on a stream of its own while one is used.
"""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device; what can't be moved stays as it is.

    Lists, tuples, named tuples, mappings and dataclasses keep their types.
    """
    if isinstance(batch, torch.Tensor | PackedSequence):
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
        mapping = copy.copy(batch)  # keeps what a subclass knows besides the items
        mapping.update({key: change(value) for key, value in batch.items()})
        return mapping
    if isinstance(batch, collections.abc.Mapping):
        return {key: change(value) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        instance = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # Frozen ones too: the copy is ours, and nobody has seen it yet.
            object.__setattr__(instance, field.name, change(getattr(batch, field.name)))
        return instance
    return batch


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that ``move`` moves by itself."""
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
