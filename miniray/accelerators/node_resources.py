"""The accelerators that a node announces, and the environments of its workers.

The result is plain data: the daemon sends it to the head and keeps it to set the
environment of each worker it starts.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from miniray.accelerators.base import AcceleratorRequestError, Detected
from miniray.accelerators.host import DetectionError
from miniray.accelerators.registry import (
    DEVICE_RESOURCES,
    FAMILIES,
    GPU_FAMILIES,
    CustomDevice,
    family_named,
    parse_declaration,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.accelerators.base import Family
    from miniray.accelerators.host import Host

logger = logging.getLogger(__name__)

#: Every label is given under our own name and under Ray's.
_LABEL_DOMAINS = ("miniray.io", "ray.io")


class DeviceGroup(NamedTuple):
    """The devices of one resource on a node."""

    #: Lowest first: the order in which they are handed out.
    ids: tuple[str, ...]
    family: str
    #: The variable that names a worker's devices, None for a custom resource without one.
    variable: str | None
    fractional: bool
    #: How many devices the machine has; fewer or more may be announced.
    detected: int


@dataclasses.dataclass
class NodeAccelerators:
    """What a node says of its accelerators."""

    #: By resource; a resource without devices is absent.
    devices: Mapping[str, DeviceGroup] = dataclasses.field(default_factory=dict)
    #: Scalar resources: ``accelerator_type:A100``, a TPU slice's name and its head.
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


def resolve_node_accelerators(
    requested_num_gpus: float | None,
    requested_resources: Mapping[str, object],
    host: Host,
    gpu_family: str | None = None,
) -> NodeAccelerators:
    """Decide what a node announces.

    Amounts that the user gives are announced even beyond what exists, but not beyond what
    the family's variable names in the daemon's environment. What the user does not
    mention is detected.

    Args:
        requested_num_gpus: GPUs to announce; None to detect them.
        requested_resources: Amounts by resource name. Accelerators and declarations of custom
            devices (a mapping with ``count``) are read; other entries are the caller's.
        host: The machine.
        gpu_family: ``nvidia``, ``amd`` or ``intel``: the vendor of the GPUs. By default
            the first of these that is found; logical GPUs are NVIDIA's.

    Raises:
        AcceleratorRequestError: A count is not a whole number, or exceeds what the
            family's variable names, or a declaration is wrong, or takes the variable of another
            resource.
    """
    if "GPU" in requested_resources:
        raise AcceleratorRequestError("GPUs are announced with num_gpus, not in resources")
    found = _Announcement(host)
    counts = {family.resource: requested_resources.get(family.resource) for family in FAMILIES}
    wanted = {
        resource: _whole(resource, requested_num_gpus if resource == "GPU" else given)
        for resource, given in counts.items()
    }
    named = None if gpu_family is None else family_named(gpu_family, GPU_FAMILIES)
    gpu_families = GPU_FAMILIES if named is None else (named,)
    others = [family for family in FAMILIES if family.resource != "GPU"]
    looked_for = [family for family in (*gpu_families, *others) if wanted[family.resource] != 0]
    detected = _detect_all(looked_for, host)
    if wanted["GPU"] != 0:
        found.add(*_choose_gpu_family(gpu_families, detected, host), wanted["GPU"])
    for family in others:
        if family in detected:
            found.add(family, detected[family], wanted[family.resource])
    for resource, given in requested_resources.items():
        if resource not in DEVICE_RESOURCES and isinstance(given, Mapping):
            custom, amount = parse_declaration(resource, given)
            found.add(custom, Detected(), _whole(resource, amount))
    return NodeAccelerators(found.devices, found.resources, found.labels)


def assigned_environment(
    assignment: Mapping[str, Sequence[str]],
    accelerators: NodeAccelerators,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that show a worker its devices.

    Args:
        assignment: Device ids by resource, as leased from this node.
        accelerators: What the node announced.
        environ: The daemon's environment.

    Returns:
        What to set on top of the inherited environment. A worker without devices of
        a resource keeps the variable that it inherits.
    """
    variables: dict[str, str] = {}
    for resource, ids in assignment.items():
        if ids:
            group = accelerators.devices[resource]
            family = _family_of(resource, group)
            variables |= family.worker_environment(ids, environ, group.detected)
    return variables


def needs_fresh_interpreter(
    assignment: Mapping[str, Sequence[str]], accelerators: NodeAccelerators
) -> bool:
    """Return whether a worker with these devices must be a new interpreter instead of a fork.

    Args:
        assignment: Device ids by resource, as leased from this node.
        accelerators: What the node announced.
    """
    return any(
        not _family_of(resource, accelerators.devices[resource]).read_late
        for resource, ids in assignment.items()
        if ids
    )


class _Announcement:
    """Collects what a node announces, one family after the other."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.devices: dict[str, DeviceGroup] = {}
        self.resources: dict[str, float] = {}
        self.labels: dict[str, str] = {}

    def add(self, family: Family, detected: Detected, requested: int | None) -> None:
        """Announce a family's devices: as many as requested, or those found."""
        ids = _announced_ids(family, detected, requested, self._host.environ)
        if not ids:
            return
        variable = family.governing_variable(self._host.environ)
        for other, group in self.devices.items():
            if variable is not None and group.variable == variable:
                raise AcceleratorRequestError(
                    f"The devices of {family.resource!r} can't be named in {variable}, which names "
                    f"those of {other!r}: a worker may have both"
                )
        self.devices[family.resource] = DeviceGroup(
            ids=tuple(ids),
            family=family.name,
            variable=variable,
            fractional=family.fractional,
            detected=len(detected.ids),
        )
        about = family.describe(self._host, detected)
        self.resources.update(about.resources)
        labels = dict(about.labels)
        if about.type is not None:
            self.resources[f"accelerator_type:{about.type}"] = 1
            # A label has one value: the first family's, as GPUs come first.
            labels.setdefault("accelerator-type", about.type)
        for name, value in labels.items():
            for domain in _LABEL_DOMAINS:
                self.labels.setdefault(f"{domain}/{name}", value)


def _announced_ids(
    family: Family, detected: Detected, requested: int | None, environ: Mapping[str, str]
) -> list[str]:
    if requested is None and not detected.ids:
        return []  # there is no device that a variable could name
    visible = family.visible_ids(environ)
    if requested is None:
        return (
            list(detected.ids) if visible is None else family.existing(visible, detected, environ)
        )
    if visible is None:
        ids = list(detected.ids[:requested])
        free = (str(index) for index in range(requested) if str(index) not in ids)
        return ids + [next(free) for _ in range(requested - len(ids))]
    if requested > len(visible):
        raise AcceleratorRequestError(
            f"{requested} {family.resource} are asked for, but "
            f"{family.restriction(environ)} names {len(visible)}: "
            f"ask for at most {len(visible)}, or name more devices before the node starts"
        )
    return visible[:requested]


def _choose_gpu_family(
    families: Sequence[Family], detected: Mapping[Family, Detected], host: Host
) -> tuple[Family, Detected]:
    """Return whose GPUs a node announces, with those that were found."""
    fallback: tuple[Family, Detected] | None = None
    for family in families:
        if not detected[family].ids:
            continue
        if _announced_ids(family, detected[family], None, host.environ):
            return family, detected[family]
        fallback = fallback or (family, detected[family])  # there, but hidden by its variable
    return fallback or (families[0], detected[families[0]])


def _detect_all(families: Sequence[Family], host: Host) -> dict[Family, Detected]:
    """Detect families in threads: a tool that hangs takes its whole time limit."""
    if not families:
        return {}
    with ThreadPoolExecutor(len(families), thread_name_prefix="miniray-detect") as pool:
        found = pool.map(lambda family: detect(family, host), families)
        return dict(zip(families, found, strict=True))


def detect(family: Family, host: Host) -> Detected:
    """Detect the devices of a family; log a broken driver and return none."""
    try:
        return family.detect(host)
    except (DetectionError, OSError) as error:
        logger.warning(
            "No %s of family %s is counted, since %s. Give the number yourself to use them.",
            family.resource,
            family.name,
            error,
        )
        return Detected()


def _family_of(resource: str, group: DeviceGroup) -> Family:
    if group.family == CustomDevice.name:
        return CustomDevice(resource, group.variable, group.fractional)
    return family_named(group.family)


def _whole(resource: str, amount: object) -> int | None:
    """Return a node's count of devices; None where the user does not say it."""
    if amount is None:
        return None
    if (
        isinstance(amount, bool)
        or not isinstance(amount, (int, float))
        or amount < 0
        or amount % 1 != 0
    ):
        raise AcceleratorRequestError(
            f"A node's number of {resource} must be a whole number from 0 on, not {amount!r}"
        )
    return int(amount)
