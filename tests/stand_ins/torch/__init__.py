"""Stands in for PyTorch on GPUs of 16 GiB, whose memory is files in a folder.

What a process takes of a device is free again when the process is gone. With ``STAND_IN_LEAKS``
in the environment it stays, as if the driver had lost it.
"""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

__version__ = "2.9-stand-in"
version = types.SimpleNamespace(cuda="13.0", hip=None)
distributed = types.SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: False)
uint8 = "uint8"

_TOTAL = 16 << 30
_FOLDER = Path(os.environ["STAND_IN_MEMORY"])


def _devices() -> list[str]:
    every = [str(number) for number in range(int(os.environ["STAND_IN_GPUS"]))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return every if visible is None else [id for id in visible.split(",") if id in every]


def _is_held(path: Path) -> bool:
    pid = path.name.partition("-")[2]
    return "STAND_IN_LEAKS" in os.environ or Path(f"/proc/{pid}").exists()


def _own() -> Path:
    return _FOLDER / f"{_devices()[0]}-{os.getpid()}"


def _mem_get_info() -> tuple[int, int]:
    held = [path for path in _FOLDER.glob(f"{_devices()[0]}-*") if _is_held(path)]
    return _TOTAL - sum(int(path.read_text() or 0) for path in held), _TOTAL


def _reserved() -> int:
    return int(_own().read_text()) if _own().exists() else 0


def _take(size: int) -> None:
    """A caching allocator: memory that was freed stays with the process."""
    free, _ = _mem_get_info()
    if size > free + _reserved():
        raise RuntimeError("CUDA out of memory")
    _own().write_text(str(max(size, _reserved())))


class Tensor:
    """Values that are all the same."""

    def __init__(self, value: float, count: int) -> None:
        self.value, self.count = value, count

    def __iadd__(self, amount: float) -> Tensor:
        return Tensor(self.value + amount, self.count)

    def __getitem__(self, index: int) -> Tensor:
        return Tensor(self.value, 1)

    def sum(self) -> Tensor:
        """All of them in one."""
        return Tensor(self.value * self.count, 1)

    def item(self) -> float:
        """The value."""
        return self.value


def ones(count: int, device: str) -> Tensor:
    """Ones on a device."""
    _take(4 * count)
    return Tensor(1.0, count)


def empty(size: int, dtype: Any, device: str) -> Tensor:
    """Bytes on a device."""
    _take(size)
    return Tensor(0.0, size)


cuda = types.SimpleNamespace(
    device_count=lambda: len(_devices()),
    mem_get_info=_mem_get_info,
    memory_reserved=_reserved,
    get_device_properties=lambda index: types.SimpleNamespace(
        name="NVIDIA H200", uuid=f"GPU-{_devices()[index]}"
    ),
)
