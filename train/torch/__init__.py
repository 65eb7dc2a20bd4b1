"""Training with PyTorch, with the public names of Ray Train's torch module.

PyTorch itself is loaded when a name that needs it is first used, so that a
driver that only starts a ``TorchTrainer`` does not load it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miniray.common.absent import absent, tell_imports
from miniray.train.torch.config import TorchConfig
from miniray.train.torch.torch_trainer import TorchTrainer

if TYPE_CHECKING:
    from miniray.train.torch.amp import accelerate, backward, prepare_optimizer
    from miniray.train.torch.checkpoint import TorchCheckpoint
    from miniray.train.torch.data_loader import prepare_data_loader
    from miniray.train.torch.models import (
        enable_reproducibility,
        get_device,
        get_devices,
        prepare_model,
    )

_HOMES = {
    "TorchCheckpoint": "checkpoint",
    "accelerate": "amp",
    "backward": "amp",
    "enable_reproducibility": "models",
    "get_device": "models",
    "get_devices": "models",
    "prepare_data_loader": "data_loader",
    "prepare_model": "models",
    "prepare_optimizer": "amp",
}

#: Names of Ray Train that are not here, and what to do instead.
_ABSENT = {
    "xla": "PyTorch runs on CPUs and GPUs here; on TPUs train with miniray.train.jax.JaxTrainer",
}
tell_imports(__name__, _ABSENT)

__all__ = [
    "TorchCheckpoint",
    "TorchConfig",
    "TorchTrainer",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise absent(__name__, name, _ABSENT)
    value = getattr(importlib.import_module(f"miniray.train.torch.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
