"""What a user says about a run: scale, storage, checkpoints, failures.

Each class refuses nonsense when it is made, with the reason and the fix. What
follows from the values is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.callbacks import Callback

PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

#: Where runs are kept when ``RunConfig(storage_path)`` is not given.
DEFAULT_STORAGE_PATH = "~/miniray_results"

#: Amount of ``accelerator_type:<type>`` that a worker asks for; there is 1 per node.
ACCELERATOR_TYPE_SHARE = 0.001

_MISSPELLED = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU", "Memory": "memory", "MEMORY": "memory"}


@dataclasses.dataclass(kw_only=True)
class ScalingConfig:
    """How many workers train, and what each of them holds.

    Args:
        num_workers: Number of workers; each is an actor that runs the train loop.
        use_gpu: Whether workers train on GPUs: 1 each unless ``resources_per_worker`` says
            otherwise.
        resources_per_worker: Amount per resource name that each worker holds: ``"CPU"``,
            ``"GPU"``, ``"memory"`` in bytes, or any custom resource. Default: 1 CPU, or with
            ``use_gpu`` 1 GPU.
        placement_strategy: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
        trainer_resources: What the controller of the run holds. Default: nothing; it only
            coordinates.
        accelerator_type: Workers run only on nodes with this type, such as ``"A100"``.

    Raises:
        ValueError: A value makes no sense; the message says which and what is allowed.
    """

    num_workers: int = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    trainer_resources: Mapping[str, float] | None = None
    accelerator_type: str | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.num_workers, least=1):
            raise ValueError(
                f"ScalingConfig(num_workers={self.num_workers!r}) must be a whole number, 1 or "
                f"more: that many actors run the train loop."
            )
        if self.placement_strategy not in PLACEMENT_STRATEGIES:
            raise ValueError(
                f"ScalingConfig(placement_strategy={self.placement_strategy!r}) is not known. "
                f"Use one of {', '.join(PLACEMENT_STRATEGIES)}."
            )
        check_resources("resources_per_worker", self.resources_per_worker)
        check_resources("trainer_resources", self.trainer_resources)
        self._check_gpus()
        if not self.worker_resources:
            raise ValueError(
                f"ScalingConfig(resources_per_worker={self.resources_per_worker!r}) asks for "
                f"nothing. Give each worker at least a share of one resource, "
                f'such as {{"CPU": 1}}.'
            )

    def _check_gpus(self) -> None:
        gpus = (self.resources_per_worker or {}).get("GPU")
        if not self.use_gpu and gpus:
            raise ValueError(
                f'ScalingConfig(resources_per_worker={{"GPU": {gpus}}}) asks for GPUs while '
                f"use_gpu is False. Set use_gpu=True to train on GPUs, or leave GPU out."
            )
        if self.use_gpu and gpus == 0:
            raise ValueError(
                'ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0}) contradicts itself. '
                "Ask for a positive number of GPUs, or set use_gpu=False."
            )

    @property
    def worker_resources(self) -> dict[str, float]:
        """What each worker holds, by resource name, without zeros."""
        if self.resources_per_worker is not None:
            resources = {
                name: amount for name, amount in self.resources_per_worker.items() if amount
            }
        else:
            resources = {} if self.use_gpu else {"CPU": 1.0}
        if self.use_gpu:
            resources.setdefault("GPU", 1.0)
        if self.accelerator_type is not None:
            name = f"accelerator_type:{self.accelerator_type}"
            resources.setdefault(name, ACCELERATOR_TYPE_SHARE)
        return resources

    @property
    def controller_resources(self) -> dict[str, float]:
        """What the controller holds, by resource name, without zeros."""
        given = self.trainer_resources or {}
        return {name: amount for name, amount in given.items() if amount}

    @property
    def total_resources(self) -> dict[str, float]:
        """What a run holds in all: the controller and every worker."""
        total = dict(self.controller_resources)
        for name, amount in self.worker_resources.items():
            total[name] = total.get(name, 0.0) + amount * self.num_workers
        return total

    @property
    def num_cpus_per_worker(self) -> float:
        """CPUs that each worker holds."""
        return self.worker_resources.get("CPU", 0.0)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs that each worker holds."""
        return self.worker_resources.get("GPU", 0.0)


def is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number that is not below ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_amount(value: Any) -> bool:
    """Whether a value can be an amount of a resource: a finite number of 0 or more."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def check_resources(argument: str, resources: Mapping[str, float] | None) -> None:
    """Raise ValueError if these can't be amounts of resources.

    Args:
        argument: Name of the ScalingConfig argument, for the message.
        resources: Amount per resource name, or None.
    """
    if resources is None:
        return
    given = f"ScalingConfig({argument}={resources!r})"
    if not hasattr(resources, "items"):
        raise ValueError(
            f'{given} must be a dictionary of amounts by resource name, such as {{"CPU": 2}}.'
        )
    for name, amount in resources.items():
        if name in _MISSPELLED:
            raise ValueError(
                f"{given} names {name!r}; resource names are case-sensitive. "
                f"Write {_MISSPELLED[name]!r}."
            )
        if not isinstance(name, str) or not name:
            raise ValueError(f"{given} has the key {name!r}; resource names are non-empty strings.")
        if not is_amount(amount):
            raise ValueError(
                f"{given} gives {name!r} as {amount!r}; an amount is a number of 0 or more."
            )
        if name == "GPU" and amount > 1 and amount != int(amount):
            raise ValueError(
                f"{given} asks for {amount} GPUs. A worker shares one GPU (up to 1) or has "
                f"several wholly to itself: ask for a fraction below 1 or a whole number."
            )


@dataclasses.dataclass(kw_only=True)
class CheckpointConfig:
    """Which checkpoints are kept.

    Args:
        num_to_keep: At most this many are kept: the newest, or with a score attribute the best.
            The latest one always stays, since a restart begins from it. None keeps all.
        checkpoint_score_attribute: Key of the reported metrics that scores a checkpoint; keys of
            nested dictionaries are joined by ``/``.
        checkpoint_score_order: ``"max"`` if a higher score is better, else ``"min"``.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.num_to_keep is not None and not is_whole(self.num_to_keep, least=1):
            raise ValueError(
                f"CheckpointConfig(num_to_keep={self.num_to_keep!r}) must be 1 or more, "
                f"or None to keep all."
            )
        if self.checkpoint_score_order not in ("max", "min"):
            raise ValueError(
                f"CheckpointConfig(checkpoint_score_order={self.checkpoint_score_order!r}) must be "
                f"'max' (higher is better) or 'min'."
            )
        attribute = self.checkpoint_score_attribute
        if attribute is not None and (not isinstance(attribute, str) or not attribute):
            raise ValueError(
                f"CheckpointConfig(checkpoint_score_attribute={attribute!r}) must be a key of the "
                f"metrics that the train loop reports."
            )


@dataclasses.dataclass(kw_only=True)
class FailureConfig:
    """What happens when workers fail.

    Args:
        max_failures: How many times a run starts its workers again, from its newest
            checkpoint, after some of them failed. 0: never; -1: without end.
    """

    max_failures: int = 0

    def __post_init__(self) -> None:
        if not is_whole(self.max_failures, least=-1):
            raise ValueError(
                f"FailureConfig(max_failures={self.max_failures!r}) must be a number of restarts: "
                f"0 for none, -1 for no limit."
            )


def default_run_name() -> str:
    """A name for a run whose user gave none: the time, and a part that makes it unique."""
    now = datetime.datetime.now(tz=datetime.timezone.utc).astimezone()
    return f"train_run-{now:%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(3)}"


@dataclasses.dataclass(kw_only=True)
class RunConfig:
    """Name, storage and rules of a run.

    Args:
        name: Name of the run and of its folder in the storage. A run with the name of an older
            one continues it: ``get_checkpoint()`` gives its newest checkpoint. Default: a new one.
        storage_path: Folder or URL that holds the folders of runs. Workers on several machines
            need one that all of them reach. Default: ``~/miniray_results``.
        storage_filesystem: An fsspec or pyarrow filesystem for ``storage_path``, which is then a
            path on it and not a URL.
        failure_config: What happens when workers fail.
        checkpoint_config: Which checkpoints are kept.
        callbacks: Callbacks that the controller of the run calls.
        worker_runtime_env: Runtime environment of the workers.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: list[Callback] | None = None
    worker_runtime_env: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            check_folder_name("RunConfig(name", self.name)
        self.failure_config = instance_of("failure_config", self.failure_config, FailureConfig)
        self.checkpoint_config = instance_of(
            "checkpoint_config", self.checkpoint_config, CheckpointConfig
        )
        self.callbacks = list(self.callbacks or [])
        if self.callbacks:
            from miniray.train.callbacks import Callback

            strange = [entry for entry in self.callbacks if not isinstance(entry, Callback)]
            if strange:
                raise ValueError(
                    f"RunConfig(callbacks) holds {strange[0]!r}. "
                    f"A callback is an instance of a subclass of miniray.train.Callback."
                )
        if self.storage_filesystem is not None and self.storage_path is None:
            raise ValueError(
                "RunConfig(storage_filesystem) needs a storage_path: the folder on that filesystem."
            )

    @property
    def storage_url(self) -> str:
        """The storage path as text, with ``~`` expanded."""
        path = os.fspath(
            self.storage_path if self.storage_path is not None else DEFAULT_STORAGE_PATH
        )
        return str(Path(path).expanduser()) if path.startswith("~") else path


def instance_of(argument: str, value: Any, kind: type) -> Any:
    """The value, or the default of its class for None; raise ValueError for other values."""
    value = kind() if value is None else value
    matches = isinstance(value, kind)
    if not matches:
        raise ValueError(
            f"{argument}={value!r} must be a miniray.train.{kind.__name__}, not a "
            f"{type(value).__module__}.{type(value).__qualname__}."
        )
    return value


def check_folder_name(argument: str, name: str) -> None:
    """Raise ValueError if this can't be the name of one folder.

    Args:
        argument: How the message names the argument, up to its name: ``RunConfig(name``.
        name: The name to check.
    """
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(
            f"{argument}={name!r}) must be the name of one folder: not empty, "
            f"without a slash, not beginning with a dot."
        )
