"""The part of ``ScalingConfig`` that concerns TPU slices.

Shapes of slices come from ``miniray.accelerators.tpu``; here is what
they mean for workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.util.tpu_reservation import POD_TYPE, SLICE_NAME

if TYPE_CHECKING:
    from miniray.accelerators.tpu import SliceShape
    from miniray.train.config.scaling import ScalingConfig

_EXAMPLE = 'topology="4x4", accelerator_type="TPU-V6E"'


def check(config: ScalingConfig) -> None:
    """Raise ValueError if workers with TPUs can't be as this says."""
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
    shape = slice_shape(config)
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


def slice_shape(config: ScalingConfig) -> SliceShape | None:
    """Hosts and chips of the slice that the workers run on; None if it is not named."""
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


def type_of_nodes(config: ScalingConfig) -> str | None:
    """The accelerator type as nodes name it: ``TPU-V6E`` for the hosts of a slice of ``v6e``."""
    if slice_shape(config) is None:
        return config.accelerator_type
    from miniray.accelerators.tpu import generation

    assert config.accelerator_type is not None
    return f"TPU-{generation(config.accelerator_type).upper()}"


def default_chips(config: ScalingConfig) -> float:
    """Chips of a worker that are not given: those of a host of the slice, else 1."""
    shape = slice_shape(config)
    return float(shape.chips_per_host) if shape is not None else 1.0


def default_resources(config: ScalingConfig) -> dict[str, float]:
    """What a worker holds when nothing is given; of a host of a slice, a CPU as well."""
    cpus = {} if slice_shape(config) is None else {"CPU": 1.0}
    return {**cpus, "TPU": default_chips(config)}


def slice_labels(config: ScalingConfig, index: int) -> dict[str, str]:
    """Conditions on the labels of the host of one worker, by its number in the group.

    The hosts of a slice are those of one slice. An elastic group takes what there is.
    """
    shape = slice_shape(config)
    assert shape is not None
    labels = {POD_TYPE: shape.pod_type}
    if shape.hosts > 1 and not config.elasticity_enabled:
        labels[SLICE_NAME] = f"same({index // shape.hosts})"
    return labels
