"""``ScalingConfig``: how many workers train, and what each of them holds.

Only what follows from the values given; whether a cluster has room for it is
the head's question.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniray.train.config import tpu
from miniray.train.config.checks import (
    by_name_only,
    check_flag,
    check_resources,
    check_text,
    is_amount,
    is_whole,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

#: Amount of ``accelerator_type:<type>`` that a worker asks for; there is 1 per node.
ACCELERATOR_TYPE_SHARE = 0.001


# Ray takes the first one for trainer_resources, which nobody means.
@by_name_only("num_workers")
@dataclasses.dataclass(kw_only=True)
class ScalingConfig:
    """How many workers train, and what each of them holds.

    Args:
        num_workers: Number of workers; each is an actor that runs the train loop. A pair
            ``(least, most)`` lets the group grow and shrink with the cluster. 0: the loop runs in
            the driver's process, for debugging and under torchrun.
        use_gpu: Whether workers train on GPUs: 1 each unless ``resources_per_worker`` says
            otherwise.
        use_tpu: Whether workers train on TPUs; each worker is one host of a slice.
        topology: Shape of the TPU slice in chips, such as ``"4x4"`` or ``"2x2x4"``. More than one
            worker needs it. The number of workers is a multiple of the hosts of a slice.
        resources_per_worker: Amount per resource name that each worker holds: ``"CPU"``,
            ``"GPU"``, ``"TPU"`` in chips, ``"memory"`` in bytes, or any custom resource. Default:
            1 CPU; with ``use_gpu`` 1 GPU; with ``use_tpu`` 1 CPU and the chips of a host of the
            slice, or without a topology 1 chip.
        accelerator_type: Workers run only on nodes with this type, such as ``"A100"`` or
            ``"TPU-V6E"``.
        placement_strategy: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``. The
            workers of a TPU slice with several hosts are on a host each, whatever this says.
        label_selector: Conditions on the labels of the nodes of workers, such as
            ``{"zone": "in(a, b)"}``: one dictionary for all workers, or a list with one for each.
        trainer_resources: What the controller of the run holds. Default: nothing; it only
            coordinates.
        elastic_resize_monitor_interval_s: With a pair as ``num_workers``, a group grows at the
            first checkpoint that is complete this many seconds after it has begun or later, if
            there is room for more workers by then. It shrinks when workers are lost, which
            ``FailureConfig(max_failures)`` has to allow.
        placement_timeout_s: Seconds that workers may wait for their resources before the run
            fails, with what is missing. Default: no limit.

    Raises:
        ValueError: A value makes no sense; the message says which and what to write instead.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    use_tpu: bool = False
    topology: str | None = None
    resources_per_worker: Mapping[str, float] | None = None
    accelerator_type: str | None = None
    placement_strategy: str = "PACK"
    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None
    trainer_resources: Mapping[str, float] | None = None
    elastic_resize_monitor_interval_s: float = 60.0
    placement_timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_flag("ScalingConfig(use_gpu", self.use_gpu)
        check_flag("ScalingConfig(use_tpu", self.use_tpu)
        check_text("ScalingConfig(accelerator_type", self.accelerator_type, "A100")
        check_text("ScalingConfig(topology", self.topology, "4x4")
        self._check_counts()
        if self.placement_strategy not in PLACEMENT_STRATEGIES:
            raise ValueError(
                f"ScalingConfig(placement_strategy={self.placement_strategy!r}) is not known. "
                f"Use one of {', '.join(PLACEMENT_STRATEGIES)}."
            )
        check_resources("resources_per_worker", self.resources_per_worker)
        check_resources("trainer_resources", self.trainer_resources)
        self._check_accelerators()
        self._check_times()
        if not self.worker_resources:
            raise ValueError(
                f"ScalingConfig(resources_per_worker={self.resources_per_worker!r}) asks for "
                f"nothing. Give each worker at least a share of one resource, "
                f'such as {{"CPU": 1}}.'
            )
        self._check_labels()

    # --- checks --------------------------------------------------------------------------

    def _check_counts(self) -> None:
        given = f"ScalingConfig(num_workers={self.num_workers!r})"
        workers: Any = self.num_workers
        if isinstance(workers, list):
            self.num_workers = workers = tuple(workers)  # as a configuration file writes a pair
        if not isinstance(workers, tuple):
            if not is_whole(workers, least=0):
                raise ValueError(
                    f"{given} must be a whole number, 1 or more: that many actors run the train "
                    f"loop. 0 runs it in this process, (least, most) lets the group grow and "
                    f"shrink."
                )
            return
        if len(workers) != 2 or not all(is_whole(number, least=1) for number in workers):
            raise ValueError(
                f"{given} must be a whole number or a pair (least, most) of whole numbers, "
                f"1 or more each, such as (2, 8)."
            )
        least, most = workers
        if least > most:
            raise ValueError(f"{given} has a least number above the most. Write ({most}, {least}).")

    def _check_accelerators(self) -> None:
        if self.use_gpu and self.use_tpu:
            raise ValueError(
                "ScalingConfig(use_gpu=True, use_tpu=True) asks for both. Workers train on one "
                "kind of accelerator: leave one of them out."
            )
        for resource, flag in (("GPU", "use_gpu"), ("TPU", "use_tpu")):
            amount = (self.resources_per_worker or {}).get(resource)
            wanted = getattr(self, flag)
            if not wanted and amount:
                raise ValueError(
                    f'ScalingConfig(resources_per_worker={{"{resource}": {amount}}}) asks for '
                    f"{resource}s while {flag} is False. Set {flag}=True to train on {resource}s, "
                    f"or leave {resource} out."
                )
            if wanted and amount == 0:
                raise ValueError(
                    f"ScalingConfig({flag}=True, resources_per_worker={{"
                    f'"{resource}": 0}}) contradicts itself. Ask for a positive number of '
                    f"{resource}s, or set {flag}=False."
                )
        if self.use_tpu:
            tpu.check(self)
        elif self.topology is not None:
            raise ValueError(
                f"ScalingConfig(topology={self.topology!r}) is the shape of a TPU slice. "
                f"Set use_tpu=True, or leave topology out."
            )

    def _check_times(self) -> None:
        interval = self.elastic_resize_monitor_interval_s
        if not is_amount(interval):
            raise ValueError(
                f"ScalingConfig(elastic_resize_monitor_interval_s={interval!r}) must be a number "
                f"of seconds, 0 or more."
            )
        timeout = self.placement_timeout_s
        if timeout is not None and (not is_amount(timeout) or timeout == 0):
            raise ValueError(
                f"ScalingConfig(placement_timeout_s={timeout!r}) must be a number of seconds "
                f"above 0, or None to wait without limit."
            )

    def _check_labels(self) -> None:
        from miniray.system.option_checks import label_selector

        given = self.label_selector
        if given is None:
            return
        where = "ScalingConfig(label_selector)"
        if self.use_tpu and self.topology:
            raise ValueError(
                f"{where} can't be given beside topology: the workers of a TPU slice run on the "
                f"hosts of that slice. Leave label_selector out."
            )
        if isinstance(given, list | tuple) and len(given) != self.max_workers:
            raise ValueError(
                f"{where} is a list of {len(given)} for {self.max_workers} workers. Give one "
                f"dictionary for each worker, or a single one for all of them."
            )
        each = given if isinstance(given, list | tuple) else [given]
        try:
            for selector in each:
                label_selector(where, selector)
        except TypeError as error:
            raise ValueError(str(error)) from None

    # --- what follows ----------------------------------------------------------------------

    @property
    def elasticity_enabled(self) -> bool:
        """Whether the group may grow and shrink."""
        return isinstance(self.num_workers, tuple)

    @property
    def min_workers(self) -> int:
        """The least number of workers."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The largest number of workers."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def workers_step(self) -> int:
        """The number of workers is a multiple of this: the hosts of a TPU slice, else 1."""
        shape = tpu.slice_shape(self) if self.use_tpu else None
        return shape.hosts if shape is not None else 1

    @property
    def worker_resources(self) -> dict[str, float]:
        """What each worker holds, by resource name, without zeros."""
        if self.resources_per_worker is not None:
            resources = {
                name: amount for name, amount in self.resources_per_worker.items() if amount
            }
        elif self.use_tpu:
            resources = tpu.default_resources(self)
        else:
            resources = {} if self.use_gpu else {"CPU": 1.0}
        if self.use_gpu:
            resources.setdefault("GPU", 1.0)
        if self.use_tpu:
            resources.setdefault("TPU", tpu.default_chips(self))
        kind = tpu.type_of_nodes(self) if self.use_tpu else self.accelerator_type
        if kind is not None:
            resources.setdefault(f"accelerator_type:{kind}", ACCELERATOR_TYPE_SHARE)
        return resources

    @property
    def controller_resources(self) -> dict[str, float]:
        """What the controller holds, by resource name, without zeros."""
        given = self.trainer_resources or {}
        return {name: amount for name, amount in given.items() if amount}

    @property
    def total_resources(self) -> dict[str, float]:
        """What a run holds in all, at most: the controller and every worker."""
        total = dict(self.controller_resources)
        for name, amount in self.worker_resources.items():
            total[name] = total.get(name, 0.0) + amount * self.max_workers
        return total

    @property
    def num_cpus_per_worker(self) -> float:
        """CPUs that each worker holds."""
        return self.worker_resources.get("CPU", 0.0)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs that each worker holds."""
        return self.worker_resources.get("GPU", 0.0)

    @property
    def num_tpus_per_worker(self) -> float:
        """TPU chips that each worker holds."""
        return self.worker_resources.get("TPU", 0.0)

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """What each worker holds besides CPUs, GPUs and TPU chips."""
        return {
            name: amount
            for name, amount in self.worker_resources.items()
            if name not in ("CPU", "GPU", "TPU")
        }

    @property
    def bundle_strategy(self) -> str:
        """How places of workers lie to each other: of a slice with several hosts, one on each."""
        return "STRICT_SPREAD" if self.workers_step > 1 else self.placement_strategy

    def bundle_label_selectors(self, num_workers: int) -> list[dict[str, str]] | None:
        """Conditions on the node of each worker of a group of this size; None for none."""
        if self.use_tpu and self.topology:
            return [tpu.slice_labels(self, index) for index in range(num_workers)]
        if self.label_selector is None:
            return None
        if isinstance(self.label_selector, Mapping):
            return [dict(self.label_selector) for _ in range(num_workers)]
        return [dict(selector) for selector in self.label_selector[:num_workers]]
