"""Tells Lightning of the worker group: which rank this is, and which device it has.

The process group is that of the ``TorchTrainer``; Lightning neither makes nor ends it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miniray.train.lightning.library import lightning
from miniray.train.torch import get_device
from miniray.train.worker.context import get_context

if TYPE_CHECKING:
    import torch

_pl = lightning()
_plugins = importlib.import_module(f"{_pl.__name__}.plugins.environments")
_LightningEnvironment: Any = _plugins.LightningEnvironment
_DDPStrategy: Any = _pl.strategies.DDPStrategy
_FSDPStrategy: Any = _pl.strategies.FSDPStrategy
_DeepSpeedStrategy: Any = _pl.strategies.DeepSpeedStrategy


class RayLightningEnvironment(_LightningEnvironment):  # type: ignore[misc]
    """The worker group as Lightning's cluster environment. For ``pl.Trainer(plugins=[...])``."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: the workers are there."""
        return True

    def world_size(self) -> int:
        """Number of workers."""
        return get_context().get_world_size()

    def global_rank(self) -> int:
        """Rank of this worker among all."""
        return get_context().get_world_rank()

    def local_rank(self) -> int:
        """Rank of this worker among those of its node."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """Rank of this worker's node."""
        return get_context().get_node_rank()

    def set_world_size(self, size: int) -> None:
        """Nothing to set: the trainer has decided it."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing to set: the trainer has decided it."""

    def teardown(self) -> None:
        """Leave the variables of the group as they are; it goes on after this fit."""


class _InGroup:
    """What each strategy knows of the worker group; before Lightning's class among the bases."""

    world_size: int
    global_rank: int

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """By which Lightning splits the data of its loaders."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class RayDDPStrategy(_InGroup, _DDPStrategy):  # type: ignore[misc]
    """DistributedDataParallel over the worker group. For ``pl.Trainer(strategy=...)``.

    Takes the arguments of Lightning's ``DDPStrategy``. How the process group is made is said by
    ``TorchConfig`` of the trainer.
    """


class RayFSDPStrategy(_InGroup, _FSDPStrategy):  # type: ignore[misc]
    """FullyShardedDataParallel over the worker group, on GPUs. For ``pl.Trainer(strategy=...)``.

    Takes the arguments of Lightning's ``FSDPStrategy``. How the process group is made is said by
    ``TorchConfig`` of the trainer.
    """


class RayDeepSpeedStrategy(_InGroup, _DeepSpeedStrategy):  # type: ignore[misc]
    """DeepSpeed over the worker group, on GPUs. For ``pl.Trainer(strategy=...)``.

    Takes the arguments of Lightning's ``DeepSpeedStrategy``, and needs DeepSpeed. How the process
    group is made is said by ``TorchConfig`` of the trainer.
    """


_STRATEGIES = (RayDDPStrategy, RayFSDPStrategy, RayDeepSpeedStrategy)


def prepare_trainer(trainer: Any) -> Any:
    """Check that a ``pl.Trainer`` is set up for the worker group.

    Args:
        trainer: The trainer.

    Returns:
        The trainer itself.

    Raises:
        RuntimeError: It has another strategy or environment; the message says what to pass.
    """
    if not isinstance(trainer.strategy, _STRATEGIES):
        raise RuntimeError(
            f"The strategy of the Lightning trainer is {type(trainer.strategy).__name__}, which "
            f"does not know the worker group. Pass "
            f"pl.Trainer(strategy=miniray.train.lightning.RayDDPStrategy(), ...), or another of "
            f"{', '.join(kind.__name__ for kind in _STRATEGIES)}."
        )
    environment = trainer.strategy.cluster_environment
    if not isinstance(environment, RayLightningEnvironment):
        raise RuntimeError(
            f"The cluster environment of the Lightning trainer is {type(environment).__name__}, "
            f"which does not know the worker group. Pass "
            f"pl.Trainer(plugins=[miniray.train.lightning.RayLightningEnvironment()], ...)."
        )
    return trainer
