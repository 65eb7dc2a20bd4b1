"""Training with PyTorch, with the public names of Ray Train's torch module.

PyTorch itself is loaded when a name that needs it is first used, so that a
driver that only starts a ``TorchTrainer`` does not load it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from miniray.common.absent import lazy
from miniray.train.torch import torch_trainer
from miniray.train.torch.torch_trainer import TorchConfig, TorchTrainer

if TYPE_CHECKING:
    from miniray.train.torch.checkpoint import TorchCheckpoint
    from miniray.train.torch.data_loader import prepare_data_loader
    from miniray.train.torch.models import (
        enable_reproducibility,
        get_device,
        get_devices,
        prepare_model,
        prepare_optimizer,
    )

_HOMES = {
    "TorchCheckpoint": "miniray.train.torch.checkpoint",
    "enable_reproducibility": "miniray.train.torch.models",
    "get_device": "miniray.train.torch.models",
    "get_devices": "miniray.train.torch.models",
    "prepare_data_loader": "miniray.train.torch.data_loader",
    "prepare_model": "miniray.train.torch.models",
    "prepare_optimizer": "miniray.train.torch.models",
}

_AMP = "use torch.autocast, and for float16 torch.amp.GradScaler (Ray Train refuses it, too)"
#: Names of Ray Train that are not here, and what to do instead.
_ABSENT = {
    "accelerate": _AMP,
    "backward": _AMP,
    "xla": "PyTorch runs on CPUs and GPUs here; on TPUs train with miniray.train.jax.JaxTrainer",
}

__all__ = [
    "TorchCheckpoint",
    "TorchConfig",
    "TorchTrainer",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
]

# Ray has TorchConfig in a module of its own.
config = sys.modules[f"{__name__}.config"] = torch_trainer

__getattr__, __dir__ = lazy(__name__, _HOMES, of_ray=_ABSENT)
