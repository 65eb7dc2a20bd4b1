"""``JaxTrainer``: the data parallel trainer with JAX's processes connected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.train.config import instance_of
from miniray.train.data_parallel_trainer import DataParallelTrainer
from miniray.train.jax.config import JaxConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.train.config import RunConfig, ScalingConfig
    from miniray.train.data import DataConfig


class JaxTrainer(DataParallelTrainer):
    """Runs a JAX train loop on several workers: one program over the devices of all of them.

    ``jax.distributed`` is initialised when the loop begins: ``jax.devices()`` are the devices of
    all workers, ``jax.local_devices()`` those of this one, and ``jax.process_index()`` is its
    rank. On TPUs each worker is a host of a slice.

    Args:
        train_loop_per_worker: The function; called on every worker with ``train_loop_config`` if
            it takes a parameter.
        train_loop_config: What the function is called with.
        jax_config: How the processes are connected.
        scaling_config: How many workers, and what each holds. Default: one with 1 CPU.
        run_config: Name, storage and rules of the run.
        datasets: Datasets by name, of which each worker gets its part from
            ``get_dataset_shard(name)``.
        dataset_config: Which of them are split and shuffled. Default: all.

    Raises:
        TypeError: An unknown argument, or one of Ray's that is not supported.
        ValueError: A configuration makes no sense.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        jax_config: JaxConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        **unsupported: Any,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=instance_of("jax_config", jax_config, JaxConfig),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            **unsupported,
        )
