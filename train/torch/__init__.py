"""Training with PyTorch, with the public names of Ray Train's torch module.

PyTorch itself is loaded when a name that needs it is first used, so that a
driver that only starts a ``TorchTrainer`` does not load it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miniray.train.torch.config import TorchConfig
from miniray.train.torch.trainer import TorchTrainer

if TYPE_CHECKING:
    from miniray.train.torch.train_loop_utils import (
        enable_reproducibility,
        get_device,
        get_devices,
        prepare_data_loader,
        prepare_model,
    )

__all__ = [
    "TorchConfig",
    "TorchTrainer",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("miniray.train.torch.train_loop_utils"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
