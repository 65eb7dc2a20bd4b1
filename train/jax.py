"""Training with JAX, with the public names of Ray Train's JAX module.

``JaxConfig`` says how JAX connects the workers, and which variables TPU hosts get. JAX itself is
loaded by the workers only.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from miniray.common.host_port import join_host_port
from miniray.system import option_checks as check
from miniray.train.base.ranks import SLICE_LABEL
from miniray.train.config.checks import check_field, instance_of
from miniray.train.data_parallel_trainer import DataParallelTrainer
from miniray.train.worker.backend import Backend, BackendConfig
from miniray.util.tpu import get_tpu_coordinator_env_vars

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Unpack

    from miniray.train.base.ranks import WorkerInfo
    from miniray.train.data_parallel_trainer import TrainerArguments
    from miniray.train.worker.backend import GroupMember

__all__ = ["JaxConfig", "JaxTrainer"]

#: Set by the run only: a platform gives each host those of the slices that it was started with, and
#: libtpu waits for those also when the run has fewer.
DECIDED_HERE = frozenset(
    {"MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"}
)


def slice_environments(workers: Sequence[WorkerInfo]) -> list[dict[str, str]]:
    """Return the variables of each worker, one worker on each host.

    Hosts without the name of a slice form one slice together.

    Args:
        workers: All workers, in order of rank: those of a slice follow each other.

    Returns:
        Variables in order of rank. MEGASCALE_* are there if there are several slices.

    Raises:
        ValueError: A host runs several workers, or slices have different numbers of hosts.
    """
    slices: dict[str, list[WorkerInfo]] = {}
    for worker in workers:
        slices.setdefault(worker.labels.get(SLICE_LABEL, ""), []).append(worker)
    _check(workers, slices)
    environments = []
    for number, hosts in enumerate(slices.values()):
        names = ",".join(host.address for host in hosts)
        for position in range(len(hosts)):
            variables = {"TPU_WORKER_ID": str(position), "TPU_WORKER_HOSTNAMES": names}
            if len(slices) > 1:
                coordinator = workers[0].address
                variables |= get_tpu_coordinator_env_vars(coordinator, len(slices), number)
            environments.append(variables)
    return environments


def _check(workers: Sequence[WorkerInfo], slices: dict[str, list[WorkerInfo]]) -> None:
    if len({worker.node_id for worker in workers}) < len(workers) and len(workers) > 1:
        raise ValueError(
            "Several workers were placed on one TPU host. JAX runs one process on each host: "
            "leave resources_per_worker out, so that each worker has all chips of its host."
        )
    sizes = {name: len(hosts) for name, hosts in slices.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"The workers were placed on slices with different numbers of hosts: {sizes}. "
            f"num_workers must be a multiple of the number of hosts of a slice, of one topology."
        )


#: Seconds that a process which is done waits for the others: as long as they may train. If one of
#: them fails, the controller ends all.
_SHUTDOWN_TIMEOUT = 7 * 24 * 3600


@dataclasses.dataclass
class JaxConfig(BackendConfig):
    """How the processes of a JAX run are connected.

    Args:
        use_tpu: Whether JAX runs on TPUs. Default: if the workers hold TPUs.
        use_gpu: Whether JAX runs on GPUs. Default: if the workers hold GPUs.
        timeout_s: Seconds in which all processes have to find each other.

    Raises:
        ValueError: A value makes no sense.
    """

    use_tpu: bool = False
    use_gpu: bool = False
    timeout_s: int = 300

    def __post_init__(self) -> None:
        if self.use_tpu and self.use_gpu:
            raise ValueError("JaxConfig(use_tpu=True, use_gpu=True): JAX runs on one of them.")
        check_field(self, "timeout_s", check.whole(1))

    def make_backend(self) -> JaxBackend:
        return JaxBackend(self)


class JaxBackend(Backend):
    """Connects the processes before the train loop and parts them afterwards."""

    # No preload: JAX warns of processes that are forked after it was loaded.

    def __init__(self, config: JaxConfig) -> None:
        self._config = config
        self._connected = False

    def environments(
        self, workers: Sequence[WorkerInfo], resources: Mapping[str, float]
    ) -> list[dict[str, str]]:
        """Return variables for each worker: on TPUs, those that describe its slice."""
        if platform(self._config, resources) != "tpu":
            return [{} for _ in workers]
        return slice_environments(workers)

    def prepare(self) -> None:
        """Load JAX; no device is touched by that."""
        import jax  # noqa: F401

    def on_start(self, member: GroupMember) -> None:
        """Choose the platform, set the slice's variables, connect the processes."""
        import jax

        for name, value in member.environment.items():
            if name in DECIDED_HERE:
                os.environ[name] = value
            else:
                os.environ.setdefault(name, value)  # what the platform has set, such as GKE, holds
        name = platform(self._config, member.resources)
        if "JAX_PLATFORMS" not in os.environ:
            os.environ["JAX_PLATFORMS"] = name
            jax.config.update("jax_platforms", name)
        if member.listener is not None:
            member.listener.close()  # the coordinator of JAX can't take it over and listens there
        if member.ranks.world_size == 1:
            return
        address = join_host_port(member.master_address, member.master_port)
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=member.ranks.world_size,
            process_id=member.ranks.world_rank,
            initialization_timeout=self._config.timeout_s,
            shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT,
            coordinator_bind_address=address if member.ranks.world_rank == 0 else None,
            # A batch system around the cluster does not describe these processes.
            cluster_detection_method="deactivate",
        )
        self._connected = True

    def on_shutdown(self) -> None:
        """Leave the other processes, when all of them are done."""
        if self._connected:
            import jax

            jax.distributed.shutdown()
            self._connected = False


def platform(config: JaxConfig, resources: Mapping[str, float]) -> str:
    """Return the platform of JAX that suits what the workers hold: tpu, cuda or cpu."""
    if config.use_tpu or (resources.get("TPU") and not config.use_gpu):
        return "tpu"
    return "cuda" if config.use_gpu or resources.get("GPU") else "cpu"


class JaxTrainer(DataParallelTrainer):
    """Runs a JAX train loop on several workers: one program over the devices of all of them.

    ``jax.distributed`` is initialised when the loop begins: ``jax.devices()`` are the devices of
    all workers, ``jax.local_devices()`` those of this one, and ``jax.process_index()`` is its
    rank. On TPUs each worker is a host of a slice. ``jax_config`` says how they are connected;
    the other arguments, and errors, are those of ``DataParallelTrainer``.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        jax_config: JaxConfig | None = None,
        **others: Unpack[TrainerArguments],
    ) -> None:
        config = instance_of("jax_config", jax_config, JaxConfig)
        super().__init__(train_loop_per_worker, backend_config=config, **others)
