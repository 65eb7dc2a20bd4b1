"""The paths at which programs written for Ray look for names of its second train layer.

There is one train layer here: each module below has names of ``miniray.train``,
``miniray.train.torch`` or ``miniray.train.jax``, loaded when they are first used.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from miniray.common.absent import absent, tell_imports

#: By module below this one: where its names are, and which it has.
_MODULES: dict[str, tuple[str, str]] = {
    "api": ("", ""),
    "api.callback": ("", "UserCallback"),
    "api.config": ("", "CheckpointConfig FailureConfig LoggingConfig RunConfig ScalingConfig"),
    "api.data_parallel_trainer": ("", "DataParallelTrainer"),
    "api.exceptions": ("", "ControllerError TrainingFailedError WorkerGroupError"),
    "api.report_config": ("", "CheckpointConsistencyMode CheckpointUploadMode"),
    "api.result": ("", "Result"),
    "jax": (".jax", "JaxConfig JaxTrainer"),
    "jax.jax_trainer": (".jax", "JaxTrainer"),
    "torch": (".torch", ""),
    "torch.torch_trainer": (".torch", "TorchTrainer"),
    "torch.train_loop_utils": (
        ".torch",
        (
            "enable_reproducibility get_device get_devices prepare_data_loader prepare_model "
            "prepare_optimizer"
        ),
    ),
}


class _Alias(types.ModuleType):
    """A module with some names of another one."""

    def __init__(self, name: str, home: str, names: list[str]) -> None:
        super().__init__(name, f"Names of {home}, at the path where Ray has them.")
        self.__path__: list[str] = []  # modules below it are in sys.modules
        self.__all__ = names
        self._home = home

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("__all__", ()):
            return getattr(importlib.import_module(self._home), name)
        raise absent(self.__name__, name, {})


__path__: list[str] = []
for _path, (_home, _names) in _MODULES.items():
    _module = _Alias(f"{__name__}.{_path}", f"miniray.train{_home}", _names.split())
    _parent, _, _child = _module.__name__.rpartition(".")
    sys.modules[_module.__name__] = _module
    setattr(sys.modules[_parent], _child, _module)

_HERE = "import from miniray.train itself what is public"
_ABSENT = ("context", "preemption", "reported_checkpoint", "train_fn_utils", "validation_config")
tell_imports(f"{__name__}.api", dict.fromkeys(_ABSENT, _HERE))
