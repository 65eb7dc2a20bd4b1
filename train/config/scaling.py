"""``ScalingConfig``: how many workers train, and the resources of each.

Only what follows from the values given; the head decides whether a cluster has the capacity. Shapes
of TPU slices come from ``miniray.accelerators.tpu``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniray.system import option_checks as check
from miniray.train.base.states import ScalingDecision
from miniray.train.config.checks import above_zero, check_field, is_whole, resources
from miniray.util.placement_group import STRATEGIES
from miniray.util.tpu_reservation import POD_TYPE, SLICE_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.accelerators.tpu import SliceShape

_EXAMPLE = 'topology="4x4", accelerator_type="TPU-V6E"'

#: Amount of ``accelerator_type:<type>`` that a worker demands; there is 1 per node.
ACCELERATOR_TYPE_SHARE = 0.001


# By name only: Ray takes the first one for trainer_resources, which is never meant.
@dataclasses.dataclass(kw_only=True)
class ScalingConfig:
    """How many workers train, and the resources of each.

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
            workers of a TPU slice with several hosts are on a host each, with any strategy.
        label_selector: Conditions on the labels of the nodes of workers, such as
            ``{"zone": "in(a, b)"}``: one dictionary for all workers, or a list with one for each.
        trainer_resources: What the controller of the run holds. Default: nothing; it only
            coordinates.
        elastic_resize_monitor_interval_s: With a pair as ``num_workers``, a group grows at the
            first checkpoint that is complete this many seconds after it has begun or later, if
            there is capacity for more workers by then. It shrinks when workers are lost, which
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
        check_field(self, "use_gpu", check.boolean)
        check_field(self, "use_tpu", check.boolean)
        check_field(self, "accelerator_type", check.text, or_none="takes any")
        check_field(self, "topology", check.text, or_none="takes any")
        self._check_counts()
        check_field(self, "placement_strategy", check.one_of(*STRATEGIES))
        check_field(self, "resources_per_worker", resources, or_none="means the default")
        check_field(self, "trainer_resources", resources, or_none="holds nothing")
        self._check_accelerators()
        check_field(self, "elastic_resize_monitor_interval_s", check.amount)
        check_field(self, "placement_timeout_s", above_zero, or_none="sets no limit")
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
            _check_tpu(self)
        elif self.topology is not None:
            raise ValueError(
                f"ScalingConfig(topology={self.topology!r}) is the shape of a TPU slice. "
                f"Set use_tpu=True, or leave topology out."
            )

    def _check_labels(self) -> None:
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
        check_field(self, "label_selector", _label_selectors)

    # --- what follows ----------------------------------------------------------------------

    @property
    def elasticity_enabled(self) -> bool:
        return isinstance(self.num_workers, tuple)

    @property
    def min_workers(self) -> int:
        least, _ = self._range
        return least

    @property
    def max_workers(self) -> int:
        _, most = self._range
        return most

    @property
    def _range(self) -> tuple[int, int]:
        workers = self.num_workers
        return workers if isinstance(workers, tuple) else (workers, workers)

    @property
    def workers_step(self) -> int:
        """The number of workers is a multiple of this: the hosts of a TPU slice, else 1."""
        shape = _slice_shape(self)
        return shape.hosts if shape is not None else 1

    @property
    def worker_resources(self) -> dict[str, float]:
        """What each worker holds, by resource name, without zeros."""
        shape = _slice_shape(self)
        if self.resources_per_worker is not None:
            resources = {
                name: amount for name, amount in self.resources_per_worker.items() if amount
            }
        elif self.use_gpu or (self.use_tpu and shape is None):
            resources = {}
        else:
            resources = {"CPU": 1.0}
        if self.use_gpu:
            resources.setdefault("GPU", 1.0)
        if self.use_tpu:
            resources.setdefault("TPU", 1.0 if shape is None else float(shape.chips_per_host))
        kind = self.accelerator_type
        if shape is not None:  # nodes name the type by the generation alone
            kind = f"TPU-{shape.pod_type.partition('-')[0].upper()}"
        if kind is not None:
            resources.setdefault(f"accelerator_type:{kind}", ACCELERATOR_TYPE_SHARE)
        return resources

    @property
    def group(self) -> ScalingDecision:
        """The worker group that a run starts with."""
        group = ScalingDecision(self.max_workers, self.worker_resources)
        if not self.elasticity_enabled:
            return group
        return dataclasses.replace(group, least=self.min_workers, step=self.workers_step)

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
        return self.worker_resources.get("CPU", 0.0)

    @property
    def num_gpus_per_worker(self) -> float:
        return self.worker_resources.get("GPU", 0.0)

    @property
    def num_tpus_per_worker(self) -> float:
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
        """Return conditions on the node of each of ``num_workers`` workers; None for none."""
        if self.use_tpu and self.topology:
            return [_slice_labels(self, index) for index in range(num_workers)]
        if self.label_selector is None:
            return None
        if isinstance(self.label_selector, Mapping):
            return [dict(self.label_selector) for _ in range(num_workers)]
        return [dict(selector) for selector in self.label_selector[:num_workers]]


def _label_selectors(name: str, value: Any) -> None:
    for selector in value if isinstance(value, list | tuple) else [value]:
        check.label_selector(name, selector)


def _check_tpu(config: ScalingConfig) -> None:
    for name, value in (
        ("topology", config.topology),
        ("accelerator_type", config.accelerator_type),
    ):
        # A single worker may be any host; with one of the two the other is needed as well.
        if value is None and (config.max_workers > 1 or config.topology is not None):
            raise ValueError(
                f"ScalingConfig(use_tpu=True, num_workers={config.num_workers!r}) needs {name}: "
                f"its workers are the hosts of slices, and these follow from topology and type. "
                f"Write, for example, {_EXAMPLE}."
            )
    chips = (config.resources_per_worker or {}).get("TPU")
    shape = _slice_shape(config)
    if shape is None:
        return
    if chips is not None and chips > shape.chips_per_host:
        raise ValueError(
            f'ScalingConfig(resources_per_worker={{"TPU": {chips:g}}}) asks for more chips than a '
            f"host of a {config.topology} slice of {config.accelerator_type} has. "
            f"Use at most {shape.chips_per_host}, or leave TPU out for all of them."
        )
    for workers in {config.min_workers, config.max_workers}:
        if workers % shape.hosts:
            raise ValueError(
                f"ScalingConfig(num_workers={config.num_workers!r}) does not fill whole slices: "
                f"a {config.topology} slice of {config.accelerator_type} has {shape.hosts} hosts, "
                f"and each worker is one. Use a multiple of {shape.hosts}, such as "
                f"{-(-workers // shape.hosts) * shape.hosts}."
            )


def _slice_shape(config: ScalingConfig) -> SliceShape | None:
    """Return the hosts and chips of the workers' slice; None if no slice is named."""
    if config.topology is None or config.accelerator_type is None:
        return None
    from miniray.accelerators.base import AcceleratorRequestError
    from miniray.accelerators.tpu import slice_shape

    try:
        return slice_shape(config.topology, config.accelerator_type)
    except AcceleratorRequestError as error:
        raise ValueError(
            f"ScalingConfig(topology={config.topology!r}, "
            f"accelerator_type={config.accelerator_type!r}): {error}."
        ) from None


def _slice_labels(config: ScalingConfig, index: int) -> dict[str, str]:
    """Return conditions on the labels of one worker's host, by its number in the group.

    The hosts of a slice are those of one slice. An elastic group takes what there is.
    """
    shape = _slice_shape(config)
    assert shape is not None
    labels = {POD_TYPE: shape.pod_type}
    if shape.hosts > 1 and not config.elasticity_enabled:
        labels[SLICE_NAME] = f"same({index // shape.hosts})"
    return labels
