"""A data loader whose batches come on a device."""

from __future__ import annotations

import collections.abc
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader


def move(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; what can't be moved stays as it is."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(item, device) for item in batch)
    if isinstance(batch, collections.abc.Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    return batch


def _record_stream(batch: Any, stream: Any) -> None:
    """Keep the memory of tensors made on another stream until this stream is done with them."""
    if isinstance(batch, torch.Tensor):
        batch.record_stream(stream)
    elif isinstance(batch, list | tuple):
        for item in batch:
            _record_stream(item, stream)
    elif isinstance(batch, collections.abc.Mapping):
        for value in batch.values():
            _record_stream(value, stream)


class DeviceDataLoader:
    """A loader that moves each batch to a device; otherwise the loader it wraps.

    Args:
        loader: The loader.
        device: Where batches go.
        prefetch: On a GPU, copy the next batch on a stream of its own while this one is used.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, prefetch: bool) -> None:
        self._loader = loader
        self._device = device
        self._prefetch = prefetch and device.type == "cuda"

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling look for attributes before there is a loader.
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._prefetch:
            yield from self._iterate_ahead()
        else:
            for batch in self._loader:
                yield move(batch, self._device)

    def _iterate_ahead(self) -> Iterator[Any]:
        copying = torch.cuda.Stream(self._device)
        waiting: list[Any] = []
        for batch in self._loader:
            with torch.cuda.stream(copying):
                moved = move(batch, self._device)
            if waiting:
                yield waiting.pop()
            torch.cuda.current_stream(self._device).wait_stream(copying)
            _record_stream(moved, torch.cuda.current_stream(self._device))
            waiting.append(moved)
        yield from waiting
